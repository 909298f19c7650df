"""In process: after refused calls, what is left for the garbage collector."""
from rig import *
import gc, types, collections
from deltaline_server.app import Server
from deltaline_server.config import Config
async def main():
    open("/tmp/adv_a07.json", "w").write(json.dumps(MODEL))
    async with Server(Config(random_init="/tmp/adv_a07.json", device="cpu", port=0, metrics_port=-1, max_sequences=8, shared_memory_bytes=1 << 26)) as srv:
        class S: addr = srv.address
        c = C(S); [h] = await c.open(1); X = x(0, 20000)
        good = c.req(h, P, 1, 0, X); bads = {"span": c.req(h, P, 1, 0, X, span=7), "shape": c.req(h, P, 1, 0, X)}; bads["shape"].hidden.shape[0] = 19999
        async def unary(m): await c.step(m)
        async def stream(m):
            await k.write(smsg(1, m)); await k.read()
        k = c.stream()
        for how in (unary, stream):
            for nm, m in bads.items():
                await how(m); gc.collect(); gc.disable(); 
                for _ in range(10): await how(m)
                await asyncio.sleep(.2); del _
                gc.set_debug(gc.DEBUG_SAVEALL); gc.collect(); gc.set_debug(0)
                big = [o for o in gc.garbage if isinstance(o, memoryview)] ; arr = [o for o in gc.garbage if isinstance(o, np.ndarray)]
                print(how.__name__, nm, "garbage", len(gc.garbage), "memoryviews", len(big), collections.Counter(type(o).__name__ for o in gc.garbage).most_common(12))
                fr = [o for o in gc.garbage if isinstance(o, types.FrameType)]
                print("    frames", collections.Counter(f.f_code.co_name for f in fr), [(f.f_code.co_name, n, len(v)) for f in fr for n, v in f.f_locals.items() if isinstance(v, (bytes, memoryview)) and len(v) > 10000][:4])
                fr.clear(); big.clear(); arr.clear(); gc.garbage.clear(); gc.enable(); gc.collect()
        k.cancel(); await c.ch.close()
asyncio.run(main())
