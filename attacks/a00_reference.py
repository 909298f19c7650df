from rig import *
async def main():
    s = Srv("ref"); c = C(s); w = Witness(c, record=True); await w.start()
    for i in range(60): await w.check("x")
    np.savez(Witness.REF, **{f"o": np.array(w.outs)}); print((await c.close([w.h])).state, s.stat()); await c.ch.close(); s.end()
asyncio.run(main())
