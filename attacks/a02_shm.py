from rig import *
import ctypes, fcntl
libc = ctypes.CDLL(None, use_errno=True)
async def quiet(c):
    for _ in range(200):
        if not (await c.load()).queued_rows: return
        await asyncio.sleep(.02)
    print("!!! never quiet")
async def main():
    s = Srv("a02"); c = C(s); w = Witness(c); await w.start(); base = s.stat()
    # loop create/release
    for i in range(600):
        r = await c.shm(1 << 20, ok=True); await c.rel(r.region)
        if i % 3 == 0: await c.rel(r.region)
    await w.check("create loop")
    # exhaust
    rs_ = []
    for i in range(200):
        r = await c.shm(4096)
        if isinstance(r, tuple): print("exhausted at", i, r); break
        rs_.append(r.region)
    for r in rs_: await c.rel(r)
    r = await c.shm(64 << 20, ok=True); print("full again ok", (await c.shm(1))); await c.rel(r.region)
    for sz, le in ((0, 0), (2**64-1, 0), (2**63, 0), (1, 2**64-1), (1, 2**53), (1, 2**63)): print("  create", sz, le, await c.shm(sz, le) if True else 0)
    # cancelled creates, concurrent
    async def cc():
        k = c.ch.unary_unary(A+"CreateSharedMemory")(ad.CreateSharedMemoryRequest(size_bytes=8<<20, lease_ms=100000).SerializeToString(), timeout=5)
        await asyncio.sleep(random.random()*.01); k.cancel()
        try: r = ad.CreateSharedMemoryResponse.FromString(await k); await c.rel(r.region)
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as e: pass
    for _ in range(30): await asyncio.gather(*[cc() for _ in range(8)])
    await asyncio.sleep(.5); r = await c.shm(64 << 20); print("after cancelled creates:", r if isinstance(r, tuple) else "all free")
    if not isinstance(r, tuple): await c.rel(r.region)
    await w.check("cancelled creates")
    # slices: odd offsets
    m = await Shm.make(c, 1 << 20); [h] = await c.open(1); X = x(5, 4); m.put(0, X); t0 = m.t(0, 4)
    for off in (1, 63, 2**63-64, 2**63, 2**63+64, 2**64-64, 2**64-512, (1<<20)-64, 1<<20, 2**62):
        a = await c.step(c.req(h, P, 1, 0, m.t(off, 4))); b = await c.step(c.req(h, P, 1, 0, t0, output_slice=m.o(off, 512)))
        b2 = await c.step(c.req(h, P, 1, 0, X, output_slice=m.o(off, 2**64-64))); b3 = await c.step(c.req(h, P, 1, 0, X, output_slice=m.o(512, off)))
        print("  off", off, a, b, b2, rs(b3) if not isinstance(b3, tuple) else b3)
    for shp in ([2**31-1, H], [2**31-1]*4, [2**31-1, 2**31-1], [0, H], [-1, H], [4, H, 1], [4], [], [1]*9):
        tt = m.t(0, 4); del tt.shape[:]; tt.shape.extend(shp); q = c.req(h, P, 1, 0, X); q.hidden.CopyFrom(tt); print("  shape", shp, await c.step(q))
    print("  same slice", await c.step(c.req(h, P, 1, 0, t0, output_slice=m.o(0, 512))), await c.step(c.req(h, P, 1, 0, t0, output_slice=m.o(448, 512))), "foreign", await c.step(c.req(h, P, 1, 0, m.t(0, 4, region=m.id ^ 1))), "zero", await c.step(c.req(h, P, 1, 0, m.t(0, 4, region=2**64-1))))
    [g] = await c.open(1)
    z = await c.step(c.req(g, P, 1, 0, t0, output=3, output_slice=m.o(1 << 20, 0))); print("  none output at end:", rs(z)); z = await c.step(c.req(g, P, 1, 0, t0, output=3, output_slice=m.o(1 << 20, 0))); print("   again:", rs(z))
    z = await c.step(c.req(g, D, 2, 4, t0.__class__(dtype=1, shape=[1, H], shared=t0.shared), output_slice=m.o(1024, 128))); print("  decode", rs(z)); await quiet(c); await w.check("slices")
    # file attacks while steps run
    big = await Shm.make(c, 24 << 20); n = 40000; big.put(0, x(3, n)); [h] = await c.open(1)
    def attacks():
        for nm, f in (("truncate0", lambda: os.ftruncate(big.fd, 0)), ("grow", lambda: os.ftruncate(big.fd, 1<<30)), ("seal", lambda: fcntl.fcntl(big.fd, 1033, 8)), ("unlink", lambda: os.unlink(big.r.name)), ("punch", lambda: 1/0 if libc.fallocate(big.fd, 3, ctypes.c_long(0), ctypes.c_long(24<<20)) else 0), ("chmod", lambda: os.fchmod(big.fd, 0)), ("reopen trunc", lambda: os.open(big.r.name, os.O_RDWR | os.O_TRUNC))):
            try: f(); print("   ", nm, "allowed")
            except BaseException as e: print("   ", nm, type(e).__name__, ctypes.get_errno() if nm=="punch" else e)
    tk = asyncio.create_task(c.step(c.req(h, P, 1, 0, big.t(0, n), output_slice=big.o(12 << 20, n*128)), 40)); await asyncio.sleep(.2); attacks()
    # scribble (NaN) during
    big.a[:5120000] = 255; print("scribbled:", rs(await tk)); q = (await c.desc([h])).sequences[0]; print("  state", q.state, q.spans[0].step, q.spans[0].position); await quiet(c); await w.check("file attacks")
    # release in flight, create again
    for rnd in range(12):
        mm = await Shm.make(c, 8 << 20); [h2] = await c.open(1); mm.put(0, x(rnd, 3000))
        tk = asyncio.create_task(c.step(c.req(h2, P, 1, 0, mm.t(0, 3000), output_slice=mm.o(4 << 20, 3000*128)), 30)); await asyncio.sleep(.01); await c.rel(mm.id)
        nn = await Shm.make(c, 8 << 20); assert not nn.a[16:].any(); nn.a[:] = 170; r = await tk
        o1 = mm.get(4 << 20, 3000)
        if (nn.a != 170).any(): print("!!! new region was written by the old step")
        [h3] = await c.open(1); r2 = await c.step(c.req(h3, P, 1, 0, x(rnd, 3000))); 
        if rs(r)[0] != ["EXECUTED"] or not np.allclose(o1, out(r2), atol=1e-5): print("!!! released outputs wrong", rs(r), rs(r2))
        await c.close([h2, h3]); await c.rel(nn.id)
    await quiet(c); await asyncio.sleep(.5); await w.check("release in flight"); await c.rel(big.id); await c.rel(m.id); print("closing", (await c.close([g, h])).state)
    await asyncio.sleep(.5); r = await c.shm(64 << 20); print("all free again:", r if isinstance(r, tuple) else "yes")
    if not isinstance(r, tuple): await c.rel(r.region)
    # lease expiry while a long step runs; region lease 1 s? 
    mm = await Shm.make(c, 24 << 20, lease=200); [h2] = await c.open(1); mm.put(0, x(1, 60000)); t = time.time()
    r = await c.step(c.req(h2, P, 1, 0, mm.t(0, 60000), output_slice=mm.o(12 << 20, 60000*128)), 60); print("expired meanwhile:", rs(r), f"{time.time()-t:.1f}s", "finite", np.isfinite(mm.get(12<<20, 60000)).all()); await asyncio.sleep(.5)
    print("  again after expiry:", await c.step(c.req(h2, P, 1, 0, mm.t(0, 60000), output_slice=mm.o(12 << 20, 60000*128)), 60), "inline now", rs(await c.step(c.req(h2, D, 2, 60000, x(1, 1)))))
    # inline reply of a huge shared input
    mm = await Shm.make(c, 48 << 20); [h3] = await c.open(1); mm.put(64, x(1, 300000)[:100000]); r = await c.step(c.req(h3, P, 1, 0, mm.t(64, 100000)), 60); print("big inline reply:", rs(r), r.hidden.ByteSize() if not isinstance(r, tuple) else "")
    await c.rel(mm.id); await c.close([h3, h2]); await quiet(c); await w.check("end"); print(base, "->", s.stat()); await asyncio.sleep(.3); print(s.stat(), await c.load()); await c.close([w.h]); await c.ch.close(); s.end()
asyncio.run(main())
