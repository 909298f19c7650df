"""Server process, raw calls, a witness."""
import asyncio, json, os, signal, subprocess, sys, time, mmap, random
import grpc, grpc.aio, numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from deltaline import wire
from deltaline.v1 import layer_service_pb2 as pb, admin_service_pb2 as ad, tensor_pb2 as tp
H = 32
MODEL = {"model_type": "qwen3_5_text","hidden_size": H,"intermediate_size": 64,"num_hidden_layers": 2,"layer_types": ["linear_attention","linear_attention"],"linear_num_key_heads": 2,"linear_num_value_heads": 2,"linear_key_head_dim": 8,"linear_value_head_dim": 8,"linear_conv_kernel_dim": 4,"hidden_act": "silu","rms_norm_eps": 1e-6}
L, A = "/deltaline.v1.LayerService/", "/deltaline.v1.AdminService/"
P, D, V = pb.ROW_KIND_PREFILL, pb.ROW_KIND_DECODE, pb.ROW_KIND_VERIFY
BAD = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
class Srv:
    def __init__(self, name, *opts, spans=None):
        cfg = f"/tmp/adv_{name}.json"; open(cfg, "w").write(json.dumps(MODEL))
        self.uds = f"/tmp/adv_{name}.sock"; self.logp = f"/tmp/adv_{name}.log"
        args = [sys.executable, "-m", "deltaline_server", "--random-init", cfg, "--device", "cpu", "--port", "0", "--uds", self.uds, "--shared-memory-bytes", "64MiB", "--metrics-port", "0", "--threads", "1", "--max-sequences", "16", "--max-draft-tokens", "4", "--lease-tick-s", "0.1", "--chunk-tokens", "64", "--inline-limit-bytes", "1MiB", "--dtype", "float32", "--drain-timeout-s", "2", *opts]
        self.p = subprocess.Popen(args, stdout=open(self.logp, "w"), stderr=subprocess.STDOUT)
        t = time.time()
        while time.time() - t < 60:
            if " ready " in open(self.logp).read() or "ready" in open(self.logp).read().split(): break
            if self.p.poll() is not None: raise SystemExit(open(self.logp).read())
            time.sleep(.1)
        self.addr = "unix:" + self.uds; import atexit; atexit.register(self.p.kill)
    def stat(self):
        s = open(f"/proc/{self.p.pid}/status").read()
        rss = int(s.split("VmRSS:")[1].split()[0]) // 1024
        return f"rss={rss}MiB fds={len(os.listdir(f'/proc/{self.p.pid}/fd'))} threads={s.split('Threads:')[1].split()[0]}"
    def end(self, sig=True, limit=20):
        t = time.time()
        if sig and self.p.poll() is None: self.p.send_signal(signal.SIGTERM)
        try: rc = self.p.wait(limit)
        except subprocess.TimeoutExpired:
            print("!!! HANG on SIGTERM", limit); self.p.kill(); rc = self.p.wait()
        log = open(self.logp).read()
        bad = [l for l in log.splitlines() if "Traceback" in l or " error" in l.lower() or "failed" in l or "bug" in l.lower()]
        print(f"end rc={rc} in {time.time()-t:.2f}s; bad log lines: {len(bad)}"); [print("   LOG", b) for b in bad[:10]]
        return rc
def chan(s, n=0):
    return grpc.aio.insecure_channel(s.addr, options=[("grpc.use_local_subchannel_pool",1),("grpc.max_receive_message_length",-1),("grpc.max_send_message_length",-1),("adv",n)])
def reason(status):
    for d in status.details:
        i = error_details_pb2.ErrorInfo()
        if d.Unpack(i): return i.reason
    return None
class E(Exception): pass
async def call(ch, path, msg, typ, timeout=20, ok=True):
    body = msg if isinstance(msg, bytes) else msg.SerializeToString()
    try: r = await ch.unary_unary(path)(body, timeout=timeout)
    except grpc.aio.AioRpcError as e:
        if e.code() in BAD: print("!!!", path, e.code(), e.details())
        if e.code() is grpc.StatusCode.DEADLINE_EXCEEDED: print("!!! TIMEOUT", path)
        st = rpc_status.from_call(e) if not ok else None
        if ok: raise
        return e.code().name, reason(st) if st else e.details()
    return typ.FromString(r)
class C:
    def __init__(self, s): self.s, self.ch = s, chan(s)
    async def open(self, n, lease=0):
        r = await call(self.ch, L+"OpenSequences", pb.OpenSequencesRequest(count=n, lease_ms=lease), pb.OpenSequencesResponse)
        self.epoch = r.server_epoch; return list(r.sequence)
    async def close(self, hs): return await call(self.ch, L+"CloseSequences", pb.CloseSequencesRequest(server_epoch=self.epoch, sequence=hs), pb.CloseSequencesResponse, ok=False)
    async def desc(self, hs): return await call(self.ch, L+"DescribeSequences", pb.DescribeSequencesRequest(server_epoch=self.epoch, sequence=hs), pb.DescribeSequencesResponse, ok=False)
    async def commit(self, h, step, acc, span=0): return await call(self.ch, L+"CommitSequences", pb.CommitSequencesRequest(server_epoch=self.epoch, span=span, sequence=[h], step=[step], accepted=[acc]), pb.CommitSequencesResponse, ok=False)
    async def load(self): return await call(self.ch, A+"GetLoad", ad.GetLoadRequest(), ad.GetLoadResponse)
    async def shm(self, size, lease=0, ok=False): return await call(self.ch, A+"CreateSharedMemory", ad.CreateSharedMemoryRequest(size_bytes=size, lease_ms=lease), ad.CreateSharedMemoryResponse, ok=ok)
    async def rel(self, r): return await call(self.ch, A+"ReleaseSharedMemory", ad.ReleaseSharedMemoryRequest(region=r), ad.ReleaseSharedMemoryResponse)
    def req(self, h, kind, step, pos, x, acc=-1, **kw):
        hs = h if isinstance(h, list) else [h]
        n = len(hs)
        m = pb.StepRequest(server_epoch=self.epoch, sequence=hs, kind=[kind]*n, step=[step]*n if isinstance(step,int) else step, position=[pos]*n if isinstance(pos,int) else pos, accepted=[acc]*n if isinstance(acc,int) else acc)
        if isinstance(x, np.ndarray): m.hidden.CopyFrom(wire.encode(x)); T = len(x)
        else: m.hidden.CopyFrom(x); T = x.shape[0]
        m.query_start_loc.extend([T*i//n for i in range(n+1)])
        for k, v in kw.items():
            f = getattr(m, k)
            if hasattr(f, "CopyFrom"): f.CopyFrom(v)
            else: setattr(m, k, v)
        return m
    async def step(self, m, timeout=20): return await call(self.ch, L+"Step", m, pb.StepResponse, timeout, ok=False)
    def stream(self, it=None, timeout=60): return self.ch.stream_stream(L+"StepStream")(it, timeout=timeout)
def smsg(cid, m): return pb.StepStreamRequest(correlation_id=cid, step=m).SerializeToString()
def x(seed, n): return np.random.default_rng(seed).standard_normal((n, H)).astype(np.float32)
def out(r): return wire.decode(r.hidden, limit_bytes=1<<30) if r.hidden.WhichOneof("payload") == "inline" else None
def rs(r):
    """short description of a step response"""
    if isinstance(r, tuple): return r
    return [pb.RowOutcome.Name(o)[12:] for o in r.outcome], [reason(s.status) for s in r.row_status]
class Witness:
    """Stepped alone; must equal a reference recorded from an undisturbed server."""
    REF = "/tmp/adv_ref.npz"
    def __init__(self, c, record=False): self.c, self.i, self.record, self.outs = c, 0, record, []
    async def start(self):
        [self.h] = await self.c.open(1); self.pos = 0
        self.ref = None if self.record else np.load(self.REF)["o"]
        await self.check("prefill", 9, P)
    async def check(self, what, n=1, kind=D):
        self.i += 1
        r = await self.c.step(self.c.req(self.h, kind, self.i, self.pos, x(1000+self.i, n)))
        self.pos += n
        if isinstance(r, tuple) or r.row_status: print("!!! WITNESS refused after", what, rs(r)); return
        o = out(r)[-1]; self.outs.append(o)
        if not self.record:
            same = o.tobytes() == self.ref[self.i-1].tobytes()
            print(f"   witness after {what}: {'ok' if same else '!!! DIFFERENT %g' % abs(o-self.ref[self.i-1]).max()}  {self.c.s.stat()}")
class Shm:
    @classmethod
    async def make(cls, c, size=1<<20, lease=0):
        self = cls(); r = await c.shm(size, lease, ok=True); self.c, self.id, self.r = c, r.region, r
        fd = os.open(r.name, os.O_RDWR); self.mm = mmap.mmap(fd, r.size_bytes); self.fd = fd
        assert self.mm[:16] == r.nonce; self.a = np.frombuffer(self.mm, np.uint8); return self
    def t(self, off, n, region=None): return tp.Tensor(dtype=tp.DATA_TYPE_FLOAT32, shape=[n, H], shared=tp.SharedSlice(region=region or self.id, offset=off))
    def put(self, off, v): self.a[off:off+v.nbytes] = v.reshape(-1).view(np.uint8); return self.t(off, len(v))
    def get(self, off, n): return self.a[off:off+n*H*4].view(np.float32).reshape(n, H).copy()
    def o(self, off, size, region=None): return pb.OutputSlice(region=region or self.id, offset=off, size_bytes=size)
