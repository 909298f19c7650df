from rig import *
async def main():
    for mode in (["second signal"]*2 if len(sys.argv) > 1 else ["streams mid prefill", "stopped readers", "unary mid", "shm mid", "second signal"]):
        s = Srv("a08"); c = C(s); hs = await c.open(8); ks = []; m = await Shm.make(c, 32 << 20); m.put(0, x(0, 1000))
        for i, h in enumerate(hs[:6]):
            k = c.stream(); ks.append(k)
            for j in range(8):
                q = c.req(h, P, j+1, 1000*j, x(0, 1000)) if "shm" not in mode else c.req(h, P, j+1, 1000*j, m.t(0, 1000), output_slice=m.o((1 << 20) * (1 + i), 128000))
                if "unary" in mode: ks[-1] = asyncio.create_task(c.step(q))
                else: await k.write(smsg(j, q))
        await asyncio.sleep(.2); s.p.send_signal(signal.SIGTERM); t = time.time()
        if "second" in mode: await asyncio.sleep(.1); s.p.send_signal(signal.SIGTERM)
        st = {}
        async def rd(k):
            if isinstance(k, asyncio.Task):
                r = await k; st[str(rs(r))] = st.get(str(rs(r)), 0) + 1; return
            try:
                while (b := await k.read()) is not grpc.aio.EOF:
                    r = pb.StepStreamResponse.FromString(b); d = str(rs(r.step) if r.HasField("step") else reason(r.status)); st[d] = st.get(d, 0) + 1
                st["end " + str(await k.code())] = st.get("end " + str(await k.code()), 0) + 1
            except grpc.aio.AioRpcError as e: st["end "+str(e.code())] = st.get("end "+str(e.code()), 0) + 1; 
        if mode != "stopped readers":
            try: await asyncio.wait_for(asyncio.gather(*map(rd, ks)), 25)
            except asyncio.TimeoutError: print("!!! client hang")
        print(mode, st); loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: s.end(sig=False)); print("   total since signal", round(time.time()-t, 2)); await c.ch.close()
asyncio.run(main())
