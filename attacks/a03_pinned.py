from rig import *
async def free(c, what):
    for i in range(60):
        r = await c.shm(64 << 20)
        if not isinstance(r, tuple): await c.rel(r.region); print(f"  {what}: free after {i*.1:.1f}s"); return
        await asyncio.sleep(.1)
    print("!!!", what, "not free after 6 s"); 
async def main():
    s = Srv("a03"); c = C(s); await free(c, "fresh")
    [h] = await c.open(1)
    m = await Shm.make(c); m.put(0, x(0, 4)); print(await c.step(c.req(h, P, 1, 0, m.t(0, 4), output_slice=m.o(0, 512)))); await c.rel(m.id); await free(c, "overlap error")
    m = await Shm.make(c); m.put(0, x(0, 4)); print(await c.step(c.req(h, P, 1, 0, m.t(0, 4), output_slice=m.o(512, 64)))); await c.rel(m.id); await free(c, "small error")
    m = await Shm.make(c); m.put(0, x(0, 4)); print(rs(await c.step(c.req(h, P, 1, 0, m.t(0, 4), output_slice=m.o(512, 512))))); await c.rel(m.id); print((await c.close([h])).state); await free(c, "step and close")
    [h] = await c.open(1); m = await Shm.make(c); m.put(0, x(0, 4)); print(rs(await c.step(c.req(h, D, 1, 0, m.t(0, 1), output=3, output_slice=m.o(1<<20, 0))))); print((await c.close([h])).state); await c.rel(m.id); await free(c, "none")
    [h] = await c.open(1); m = await Shm.make(c); m.put(0, x(0, 4)); bad = m.a.view(np.float32); bad[0] = np.nan; print(rs(await c.step(c.req(h, D, 1, 0, m.t(0, 1))))); await c.rel(m.id); await free(c, "nan")
    m = await Shm.make(c, 24<<20); m.put(0, x(0, 40000)); tk = asyncio.create_task(c.step(c.req(h, P, 1, 0, m.t(0, 40000), output_slice=m.o(12<<20, 40000*128)))); await asyncio.sleep(.2); m.a[:] = 255; print(rs(await tk)); await c.rel(m.id); await free(c, "poisoned"); print((await c.close([h])).state); await free(c, "poisoned, closed"); 
    [h] = await c.open(1); print(rs(await c.step(c.req(h, P, 1, 0, x(1, 200))))); await free(c, "then a step")
    m = await Shm.make(c, 8<<20); m.put(0, x(0, 3000)); tk = asyncio.create_task(c.step(c.req(h, P, 2, 200, m.t(0, 3000), output_slice=m.o(4<<20, 3000*128)))); await asyncio.sleep(.03); await c.rel(m.id); print(rs(await tk)); await c.close([h]); await free(c, "released in flight")
    # cancelled RPCs
    [h] = await c.open(1); m = await Shm.make(c, 8<<20); m.put(0, x(0, 3000)); k = c.ch.unary_unary(L+"Step")(c.req(h, P, 1, 0, m.t(0, 3000), output_slice=m.o(4<<20, 3000*128)).SerializeToString()); await asyncio.sleep(.03); k.cancel(); await c.rel(m.id); await c.close([h]); await free(c, "cancelled RPC")
    # queue timeout
    [h] = await c.open(1); m = await Shm.make(c, 8<<20); m.put(0, x(0, 3000)); await asyncio.gather(*[c.step(c.req(h, P, i+1, 1000*i, m.t(0, 1000), queue_timeout_us=5000, output_slice=m.o(4<<20, 128000))) for i in range(8)]); await c.rel(m.id); await c.close([h]); await free(c, "queue timeouts")
    [h] = await c.open(1); m = await Shm.make(c, 8<<20); m.put(0, x(0, 3000)); k = c.stream()
    for i in range(8): await k.write(smsg(i, c.req(h, P, i+1, 1000*i, m.t(0, 1000), output_slice=m.o(4<<20, 128000))))
    await asyncio.sleep(.02); k.cancel(); await c.rel(m.id); await c.close([h]); await free(c, "cancelled stream"); s.end()
asyncio.run(main())
