from rig import *
async def collect(call, n, timeout=30):
    got = {}
    async def go():
        async for b in call:
            r = pb.StepStreamResponse.FromString(b); got.setdefault(r.correlation_id, []).append(r)
            if r.WhichOneof("result") == "status" and r.status.code in (2, 13): print("!!! stream status", r.status.code, reason(r.status))
            if sum(map(len, got.values())) >= n: return
    try: await asyncio.wait_for(go(), timeout)
    except asyncio.TimeoutError: print("!!! stream timeout with", len(got), "of", n)
    except grpc.aio.AioRpcError as e: print("   stream ended", e.code(), e.details())
    return got
async def main():
    s = Srv("a01"); c = C(s); w = Witness(c); await w.start(); base = s.stat(); print(base)
    # 1 ten thousand tiny steps on one stream, 3 sequences, up to 60 in flight
    hs = await c.open(8); call = c.stream(); N = 10000; t = time.time()
    async def write():
        for k in range(N):
            i, st = k % 8, k // 8 + 1
            await call.write(smsg(k, c.req(hs[i], D, st, st-1, x(k % 50, 1))))
        await call.done_writing()
    wt = asyncio.create_task(write()); got = await collect(call, N, 60); await wt
    bad = [(k, rs(v[0].step) if v[0].HasField("step") else reason(v[0].status)) for k, v in got.items() if len(v) != 1 or not v[0].HasField("step") or v[0].step.row_status]
    print("10k tiny:", len(got), "answers, not executed:", len(bad), bad[:3], f"{time.time()-t:.1f}s"); await w.check("10k")
    # 2 stopped reader: write big prefills, never read
    call = c.stream(); sent = 0; big = x(1, 2000)
    async def flood():
        nonlocal sent
        for k in range(400): await call.write(smsg(k, c.req(hs[k % 8], P, 10**6, 0, big))); sent += 1
    try: await asyncio.wait_for(flood(), 5)
    except asyncio.TimeoutError: pass
    print("stopped reader: wrote", sent, s.stat()); await w.check("stopped reader, still open"); call.cancel(); await asyncio.sleep(.5)
    # 2b stopped reader with real steps producing outputs
    g = [(await c.open(1))[0] for _ in range(4)]; call = c.stream(); sent = 0
    async def flood():
        nonlocal sent
        for k in range(200): await call.write(smsg(k, c.req(g[k % 4], P, k//4+1, (k//4)*2000, big))); sent += 1
    try: await asyncio.wait_for(flood(), 6)
    except asyncio.TimeoutError: pass
    ld = await c.load(); print("stopped reader real: wrote", sent, s.stat(), "queued", ld.queued_rows, ld.queued_bytes, ld.reply_bytes); await w.check("b"); call.cancel()
    await asyncio.sleep(.5); d = await c.desc(g); print("   after cancel:", [(q.spans[0].step, q.spans[0].steps_in_flight) for q in d.sequences])
    await asyncio.sleep(1); d = await c.desc(g); print("   later:", [(q.spans[0].step, q.spans[0].steps_in_flight) for q in d.sequences]); print((await c.close(g)).state, await c.load())
    # 3 half closed without steps; many open idle streams; cancelled mid prefill
    for _ in range(100):
        k = c.stream(); await k.done_writing(); assert await k.read() is grpc.aio.EOF
    ks = [c.stream() for _ in range(200)]
    for k in ks: await k.wait_for_connection()
    print("200 idle:", s.stat()); [k.cancel() for k in ks]; await asyncio.sleep(.3); print("cancelled", s.stat())
    hs2 = await c.open(1)
    for rnd in range(10):
        k = c.stream(); [h] = await c.open(1)
        for j in range(8): await k.write(smsg(j, c.req(h, P, j+1, j*1000, x(j, 1000))))
        await asyncio.sleep(random.random() * .05); k.cancel()
        for _ in range(100):
            q = (await c.desc([h])).sequences[0].spans[0]
            if not q.steps_in_flight: break
            await asyncio.sleep(.05)
        else: print("!!! in flight forever")
        # gap free and consistent
        r = await c.step(c.req(h, D, q.step+1, q.position, x(3, 1)))
        if rs(r)[0] != ["EXECUTED"]: print("!!! after cancel", q, rs(r))
        r1 = await c.step(c.req(h, D, q.step+1, q.position, x(3, 1))); assert rs(r1)[0] == ["REPLAYED"] and r1.hidden == r.hidden
        await c.close([h])
    await w.check("cancel mid prefill")
    # 4 one sequence on two streams, the same steps: joined or replayed, same bytes
    [h] = await c.open(1); a, b = c.stream(), C(s).stream()
    for j in range(8):
        for k in (a, b): await k.write(smsg(7, c.req(h, P, j+1, j*500, x(j, 500))))
    ga, gb = await collect(a, 8), await collect(b, 8)
    oa, ob = [r.step for r in ga[7]], [r.step for r in gb[7]]
    print("two streams:", [rs(r)[0][0] for r in oa], [rs(r)[0][0] for r in ob], "equal", [p.hidden == q.hidden for p, q in zip(oa, ob)]); a.cancel(); b.cancel()
    # 5 order reversed, repeated step with other content, repeated correlation ids, extreme ids
    [h] = await c.open(1); k = c.stream(); ids = [0, 2**64-1, 5, 5, 5]
    ms = [c.req(h, D, 1, 0, x(0,1)), c.req(h, D, 1, 0, x(9,1)), c.req(h, D, 3, 2, x(0,1)), c.req(h, D, 2, 1, x(0,1)), c.req(h, D, 1, 0, x(0,1), output=3)]
    for i, m in zip(ids, ms): await k.write(smsg(i, m))
    g5 = await collect(k, 5); print("order:", {i: [rs(r.step) for r in v] for i, v in g5.items()}); await w.check("order")
    # 6 garbage and huge
    for name, body in (("empty", b""), ("garbage", os.urandom(300)), ("trunc", smsg(1, ms[0])[:-5]), ("huge", smsg(1, c.req(h, P, 2, 1, x(0, 20000)))), ("badshape", smsg(1, c.req(h, P, 2, 1, x(0, 3)))[:-3]), ("limit+", smsg(1, c.req(h, P, 2, 1, x(0, 8193))))):
        k = c.stream(timeout=15)
        try:
            await k.write(smsg(44, c.req(h, D, 2, 1, x(0, 1)))); await k.write(body); await k.done_writing(); rr = []
            while (m := await k.read()) is not grpc.aio.EOF: r = pb.StepStreamResponse.FromString(m); rr.append((r.correlation_id, rs(r.step) if r.HasField("step") else reason(r.status)))
            print("  ", name, rr, await k.code(), await k.details())
        except grpc.aio.AioRpcError as e: print("  ", name, e.code(), e.details()); assert e.code() not in BAD, "!!!"
    await w.check("garbage"); print(base, "->", s.stat())
    print((await c.load())); await c.close(hs + hs2 + [h, w.h]); await c.ch.close(); s.end()
asyncio.run(main())
