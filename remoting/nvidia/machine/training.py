"""A training step of ResNet-18 and what uses other libraries of the vendor: hashes to compare, times to stderr."""
import sys, time, hashlib
t0 = time.time()
import torch, torchvision
t1 = time.time()
torch.manual_seed(1)
torch.backends.cudnn.deterministic = True
torch.backends.cudnn.benchmark = False
torch.use_deterministic_algorithms(True, warn_only=True)
d = torch.device('cuda')
def h(x): return hashlib.sha1(x.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]
x = torch.randn(1024, 1024).to(d); torch.cuda.synchronize()
t2 = time.time()
print('name', torch.cuda.get_device_name(0), torch.backends.cudnn.version())
print('matmul', h(x @ x))
y = (x.bfloat16() @ x.bfloat16()); print('bf16', h(y))
m = torchvision.models.resnet18(num_classes=100)
m = m.to(d); m.train()
o = torch.optim.SGD(m.parameters(), lr=.01, momentum=.9)
inp = torch.randn(32, 3, 224, 224).to(d); tgt = torch.randint(0, 100, (32,)).to(d)
ts = []
for i in range(25):
    s = time.time()
    o.zero_grad(); l = torch.nn.functional.cross_entropy(m(inp), tgt); l.backward(); o.step(); v = l.item()
    ts.append(time.time() - s)
    if i < 5: print('loss %d %.9f' % (i, v))
print('weights', h(m.fc.weight))
print('fft', h(torch.fft.fft2(x).real))
a = x + 1024 * torch.eye(1024, device=d)
print('solve', h(torch.linalg.solve(a, x[:, :8])))
print('svd', '%.6f' % torch.linalg.svdvals(x[:256, :256]).sum().item())
e = torch.nn.Embedding(1000, 64).to(d); print('sdpa', h(torch.nn.functional.scaled_dot_product_attention(x.view(1, 16, 1024, 64).half(), x.view(1, 16, 1024, 64).half(), x.view(1, 16, 1024, 64).half())))
p = torch.randn(1 << 20).pin_memory(); print('pin', h(p.to(d, non_blocking=True) * 2))
g = torch.cuda.CUDAGraph(); z = torch.zeros(1000, device=d)
with torch.cuda.graph(g): z += 1
g.replay(); g.replay(); print('graph', z.sum().item())
s = time.time()
for i in range(200): y = x @ x
torch.cuda.synchronize()
print('TIME import %.2f s, first CUDA work %.2f s, first steps %s ms, steady step %.2f ms, 200 matmul %.1f ms, total %.2f s' % (t1 - t0, t2 - t1, [round(v * 1e3) for v in ts[:3]], sorted(ts[5:])[10] * 1e3, (time.time() - s) * 1e3, time.time() - t0), file=sys.stderr)
