"""Streams, events, graphs."""
from digest import run, show


def torch_streams():
    import deterministic
    import torch

    streams = [torch.cuda.Stream() for _ in range(4)]
    parts = [torch.randn(500, 500).cuda() for _ in streams]
    torch.cuda.synchronize()
    results = []
    for stream, part in zip(streams, parts):
        with torch.cuda.stream(stream):
            for _ in range(20):
                part = torch.tanh(part @ part / 50)
            results.append(part)
    torch.cuda.synchronize()
    show("streams", *results)


def torch_events():
    import torch

    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    for step in range(100):
        with torch.cuda.stream(first if step % 2 else second):
            torch.cuda.current_stream().wait_event(end) if step else begin.record()
            x += step
            end.record()
    end.synchronize()
    print("time passes", begin.elapsed_time(end) > 0, "done", end.query())
    show("ordered", x[::1000])


def torch_graph():
    """A step of training as one graph."""
    import deterministic
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    x = torch.randn(32, 64).cuda()

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(10):
        x.normal_()
        graph.replay()
        print(f"loss {loss.item():.9f}")


def cupy_graph():
    import cupy

    x = cupy.zeros(1000, "f")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x += 1
        stream.begin_capture()
        x *= 2
        x += 1
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
    stream.synchronize()
    show("graph", x)


if __name__ == "__main__":
    run(globals())
