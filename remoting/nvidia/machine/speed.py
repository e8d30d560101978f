"""Times of PyTorch programs: lines of a name, median, 99th percentile and unit.

Steps wait for their result, as programs do that print a loss or a token. The model like GPT-2 is its smallest form, with random
weights; so are ResNet-50 and the layers of an LSTM.
"""
import time

begin = time.perf_counter()
import torch

torch.manual_seed(1)
convolution = torch.nn.Conv2d(3, 64, 7).cuda()
convolution(torch.randn(8, 3, 224, 224).cuda()).sum().item()


def figure(name, times, unit):
    times.sort()
    print("figure", name, f"{times[len(times) // 2]:.3f} {times[len(times) * 99 // 100]:.3f}", unit, flush=True)


figure("import-to-convolution", [time.perf_counter() - begin], "s")
import torchvision
import transformers


def measure(name, step, times=120):
    """`step` in milliseconds, after twenty that are not counted."""
    took = []
    for _ in range(20 + times):
        since = time.perf_counter()
        step()
        took.append((time.perf_counter() - since) * 1e3)
    figure(name, took[20:], "ms")


def trained(model, inputs, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(inputs))
        loss.backward()
        optimizer.step()
        loss.item()
    return step


measure("resnet50-step", trained(torchvision.models.resnet50().cuda(), torch.randn(32, 3, 224, 224, device="cuda"),
                                 lambda output: output.square().mean()))
measure("lstm-step", trained(torch.nn.LSTM(256, 512, num_layers=2).cuda(), torch.randn(64, 32, 256, device="cuda"),
                             lambda output: output[0].square().mean()))
gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()
tokens = torch.randint(0, 50000, (4, 256), device="cuda")
measure("gpt2-step", trained(gpt2, tokens, lambda output: output.logits.float().square().mean()))


class Decode:
    """A token after another, with the keys and values of those before."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.past, self.token = None, tokens[:1, :1]

    @torch.no_grad()
    def __call__(self):
        if self.past is not None and self.past.get_seq_length() >= 200:
            self.reset()
        output = gpt2(self.token, past_key_values=self.past, use_cache=True)
        self.past, self.token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        self.token.item()


gpt2.eval()
measure("gpt2-token", Decode(), 400)
signal = torch.randn(64, 256, dtype=torch.complex64, device="cuda")


def transforms():
    for _ in range(1000):
        torch.fft.fft(signal)
    torch.cuda.synchronize()


measure("1000-small-ffts", transforms, 20)
free, whole = torch.cuda.mem_get_info()
used = (whole - free - torch.cuda.memory_reserved()) / (1 << 20)
figure("memory-beyond-tensors", [used], "MiB")
figure("processor-time", [time.process_time()], "s")
