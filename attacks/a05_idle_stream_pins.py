from rig import *
async def free(c, what):
    for i in range(20):
        r = await c.shm(64 << 20)
        if not isinstance(r, tuple): await c.rel(r.region); print(f"  {what}: free after {i*.1:.1f}s"); return
        await asyncio.sleep(.1)
    print("!!!", what, "not free after 2 s")
async def main():
    s = Srv("a05"); c = C(s); [h] = await c.open(1); m = await Shm.make(c); m.put(0, x(0, 4)); k = c.stream()
    await k.write(smsg(1, c.req(h, P, 1, 0, m.t(0, 4), output_slice=m.o(512, 512)))); r = pb.StepStreamResponse.FromString(await k.read()); print(rs(r.step)); await c.rel(m.id); await c.close([h])
    await free(c, "idle stream after a step"); k.cancel(); await free(c, "stream cancelled"); s.end()
asyncio.run(main())
