from rig import *
async def main():
    s = Srv("a09"); c = C(s); w = Witness(c); await w.start()
    for extra in (["--shared-memory-bytes", "8388608"], ["--mix", "prefill=1,verify=3,decode=5", "--prefill-tokens", "3000"]):
        p = subprocess.run([sys.executable, "-m", "deltaline_client", "bench", s.addr, "--clients", "3", "--rows", "2", "--duration", "4", "--ramp-up", "0.5", *extra], capture_output=True, text=True, timeout=40)
        print("bench", extra, p.returncode, p.stdout[-300:] if p.returncode else "", p.stderr[-300:]); await w.check("bench")
    # bench killed in the middle
    p = subprocess.Popen([sys.executable, "-m", "deltaline_client", "bench", s.addr, "--clients", "3", "--rows", "2", "--duration", "20", "--ramp-up", "0.5"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); await asyncio.sleep(3); p.kill(); p.wait(); await asyncio.sleep(.5); await w.check("killed bench"); print(await c.load())
    await c.close([w.h]); s.end()
asyncio.run(main())
