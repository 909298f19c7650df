from rig import *
async def quiet(c):
    for _ in range(300):
        if not (await c.load()).queued_rows: return
        await asyncio.sleep(.02)
    print("!!! never quiet")
def sr(b): return pb.StepStreamResponse.FromString(b)
async def main():
    s = Srv("a06", "--reply-bytes", "8MiB", *(["--spans", "0:1,1:2"] if "spans" in sys.argv else [])); c = C(s); w = Witness(c)
    if "spans" not in sys.argv: await w.start()
    base = s.stat(); NS = 2 if "spans" in sys.argv else 1
    # verify/commit/decode pipelines without waiting: everything is sent at once, riding commits; then describe right behind
    for rnd in range(30):
        [h] = await c.open(1); k = c.stream(); rng = random.Random(rnd); pos, st, sent, pend = 0, 0, 0, 0
        for j in range(8):
            kind = rng.choice([P, D, V]); n = {P: rng.choice([1, 3, 70, 300]), D: 1, V: rng.randint(1, 4)}[kind]; acc = rng.randint(0, pend) if pend else -1
            pos += max(acc, 0); st += 1
            await k.write(smsg(j, c.req(h, kind, st, pos, x(j, n), acc=acc))); pend = n if kind == V else 0; pos += 0 if kind == V else n
        last = None
        for j in range(8):
            r = sr(await asyncio.wait_for(k.read(), 20))
            if r.step.row_status: print("!!! pipeline", rnd, r.correlation_id, rs(r.step))
            if j == 7: last = r.step
        d = (await c.desc([h])).sequences[0].spans[0]
        if (d.step, d.position, d.steps_in_flight, d.pending_tokens) != (8, pos, 0, pend): print("!!! describe", d, pos, pend)
        if pend:
            r = await c.commit(h, 8, rng.randint(0, pend)); assert not r.row_status, r
        k.cancel(); assert (await c.close([h])).state[0] == 4, "!!! close right behind"
    # unary: each reply followed right away by describe/commit/close on another channel
    c2 = C(s); c2.epoch = c.epoch; bad = 0
    for rnd in range(100):
        [h] = await c.open(1); r = await c.step(c.req(h, V, 1, 0, x(rnd, 3))); d = (await c2.desc([h])).sequences[0].spans[0]
        if (d.step, d.steps_in_flight, d.pending_tokens) != (1, 0, 3): bad += 1
        r = await c2.commit(h, 1, 2); bad += bool(r.row_status); r2 = await c2.commit(h, 1, 2); bad += bool(r2.row_status); st = (await c2.close([h])).state[0]; bad += st != 4
        n = (await c2.load()).sequences_open
    print("right behind: bad", bad)
    if NS == 1: await quiet(c); await w.check("pipelines")
    # NaN in the middle of 8 in flight; streams and neighbours
    for rnd in range(20):
        hs = await c.open(3); k = c.stream(); bad_at = rnd % 8
        for j in range(8):
            X = np.concatenate([x(j, 70), x(j, 70), x(j, 70)])
            if j == bad_at: X[70 + rnd] = np.nan
            ps = [70*j]*3; await k.write(smsg(j, c.req(hs, P, [j+1]*3, ps, X)))
        res = sorted([sr(await asyncio.wait_for(k.read(), 20)) for _ in range(8)], key=lambda r: r.correlation_id); k.cancel()
        got = [[pb.RowOutcome.Name(o)[12:14] for o in r.step.outcome] for r in res]
        exp = [["EX", "EX" if j < bad_at else "RE", "EX"] for j in range(8)]
        if got != exp: print("!!! nan", bad_at, got)
        rr = {reason(q.status) for r in res for q in r.step.row_status}
        d = (await c.desc(hs)).sequences; assert d[1].state == 1 and d[1].spans[0].step == bad_at, d
        r = await c.step(c.req(hs[1], D, bad_at+1, bad_at*70, x(0, 1))); assert rs(r)[0] == ["EXECUTED"], rs(r)
        await c.close(hs)
    print("nan reasons", rr)
    # overflow (finite input, infinite compute): poison in the middle of the 8
    for rnd in range(8):
        hs = await c.open(2); k = c.stream()
        for j in range(8):
            X = np.concatenate([x(j, 70), x(j, 70)]); 
            if j == rnd: X[100] = 3e38
            await k.write(smsg(j, c.req(hs, P, [j+1]*2, [70*j]*2, X)))
        res = sorted([sr(await asyncio.wait_for(k.read(), 20)) for _ in range(8)], key=lambda r: r.correlation_id); k.cancel()
        print("  poison at", rnd, ["".join(pb.RowOutcome.Name(o)[12] for o in r.step.outcome) for r in res], {reason(q.status) for r in res for q in r.step.row_status}, [q.state for q in (await c.desc(hs)).sequences]); await c.close(hs)
    # lease expiry, close while in flight, then open at once
    for rnd in range(40):
        hs = await c.open(2, lease=rnd % 5 * 40 + 1 if rnd % 2 else 0); tk = [asyncio.create_task(c.step(c.req(hs[i], P, 1, 0, x(i, 400)))) for i in (0, 1)]
        await asyncio.sleep(random.random() * .06)
        if rnd % 2 == 0: st = list((await c.close(hs)).state)
        r = [rs(await t)[0] if not isinstance(await t, tuple) else await t for t in tk]
        n = await call(c.ch, L+"OpenSequences", pb.OpenSequencesRequest(count=15 if NS == 1 else 16), pb.OpenSequencesResponse, ok=False)
        if isinstance(n, tuple):
            if rnd % 2 == 0: print("   open right behind close+reply:", n, r, st)
        else: await c.close(list(n.sequence))
        if rnd % 2: await c.close(hs)
    if NS == 1: await quiet(c); await w.check("close/expiry in flight")
    # queue deadlines + RPC deadlines + cancelled unary
    for rnd in range(15):
        hs = await c.open(6); k = [asyncio.create_task(c.step(c.req(h, P, j+1, 200*j, x(j, 200), queue_timeout_us=random.choice([1, 1000, 30000, 0]), priority=random.randint(-8, 7)))) for h in hs for j in range(8)]
        for t in random.sample(k, 6): await asyncio.sleep(.002); t.cancel()
        res = await asyncio.wait_for(asyncio.gather(*k, return_exceptions=True), 30); await quiet(c)
        for q in (await c.desc(hs)).sequences:
            p = q.spans[0]
            if p.position != 200 * p.step or p.steps_in_flight: print("!!!", p)
            r = await c.step(c.req(q.sequence, D, p.step+1, p.position, x(1, 1)));
            if rs(r)[0] != ["EXECUTED"]: print("!!! after deadlines", rs(r), p)
        await c.close(hs)
    from collections import Counter
    print("deadlines last round", Counter(str(rs(r)) if not isinstance(r, BaseException) else type(r).__name__ for r in res))
    # other content on repeats: kinds, output, positions, accepted
    [h] = await c.open(1); m0 = c.req(h, V, 1, 0, x(1, 3)); r0 = await c.step(m0)
    for nm, m in (("kind", c.req(h, P, 1, 0, x(1, 3))), ("x", c.req(h, V, 1, 0, x(2, 3))), ("len", c.req(h, V, 1, 0, x(1, 2))), ("pos", c.req(h, V, 1, 5, x(1, 3))), ("acc", c.req(h, V, 1, 0, x(1, 3), acc=0)), ("out", c.req(h, V, 1, 0, x(1, 3), output=2)), ("same", m0), ("-0", c.req(h, V, 1, 0, x(1, 3)))): print("  repeat", nm, rs(await c.step(m)), end=""); 
    print(); await c.commit(h, 1, 1); print("  after commit same:", rs(await c.step(m0)), "commit other", [reason(q.status) for q in (await c.commit(h, 1, 2)).row_status]); await c.close([h])
    if NS == 1: await quiet(c); await w.check("repeats"); await c.close([w.h])
    print(base, "->", s.stat(), (await c.load()).reply_bytes); s.end()
asyncio.run(main())
