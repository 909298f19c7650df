from rig import *
async def main():
    s = Srv("a04", "--inline-limit-bytes", "8MiB"); c = C(s); [h] = await c.open(1); m = c.req(h, P, 1, 0, x(0, 60000), span=7).SerializeToString(); print(len(m) >> 20, "MiB each", s.stat())
    peak = 0
    for i in range(60):
        r = await c.step(m); rss = int(s.stat().split("MiB")[0][4:]); peak = max(peak, rss)
    print("unary refused", r, "peak", peak, s.stat()); await asyncio.sleep(2); print("idle 2 s", s.stat())
    k = c.stream(); sm = pb.StepStreamRequest(correlation_id=1, step=c.req(h, P, 1, 0, x(0, 60000), span=7)).SerializeToString(); peak = 0
    for i in range(60):
        await k.write(sm); await k.read(); peak = max(peak, int(s.stat().split("MiB")[0][4:]))
    print("stream refused peak", peak, s.stat()); await asyncio.sleep(2); print("idle 2 s", s.stat()); k.cancel(); await c.close([h]); s.end()
asyncio.run(main())
