"""GPU memory and events that two processes share."""
import multiprocessing

import numpy
from digest import run, show


def torch_sender(queue, done):
    import torch

    queue.put(torch.arange(100000.0).cuda())
    done.wait()


def torch_queue():
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    child = context.Process(target=torch_sender, args=(queue, done))
    child.start()
    got = queue.get()
    show("received", got)
    del got
    done.set()
    child.join()
    print("child", child.exitcode)


def torch_writer(tensor):
    import torch

    tensor *= 3
    torch.cuda.synchronize()


def torch_written():
    import torch

    context = torch.multiprocessing.get_context("spawn")
    tensor = torch.arange(1000.0).cuda()
    child = context.Process(target=torch_writer, args=(tensor,))
    child.start()
    child.join()
    show("written by the child", tensor)


def torch_trainer(model):
    import torch

    x = torch.ones(4, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()


def torch_model():
    """A model that another process trains."""
    import deterministic
    import torch

    model = torch.nn.Linear(8, 4).cuda()
    model.share_memory()
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=torch_trainer, args=(model,))
    child.start()
    child.join()
    show("trained", model.weight)


def torch_event_child(event, tensor, queue):
    import torch

    event.wait(torch.cuda.current_stream())
    queue.put(float(tensor.sum()))


def torch_event():
    import torch

    context = torch.multiprocessing.get_context("spawn")
    event, queue = torch.cuda.Event(interprocess=True), context.Queue()
    tensor = torch.ones(1000).cuda()
    event.record()
    child = context.Process(target=torch_event_child, args=(event, tensor, queue))
    child.start()
    print("sum", queue.get())
    child.join()


def cupy_child(handle, queue):
    import cupy

    pointer = cupy.cuda.runtime.ipcOpenMemHandle(handle)
    memory = cupy.cuda.UnownedMemory(pointer, 4000, None)
    array = cupy.ndarray(1000, "f", cupy.cuda.MemoryPointer(memory, 0))
    queue.put(array.get())
    array += 1
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.ipcCloseMemHandle(pointer)


def cupy_handle():
    import cupy

    cupy.cuda.set_allocator(None)
    context = multiprocessing.get_context("spawn")
    array, queue = cupy.arange(1000, dtype="f"), context.Queue()
    handle = cupy.cuda.runtime.ipcGetMemHandle(array.data.ptr)
    child = context.Process(target=cupy_child, args=(handle, queue))
    child.start()
    show("seen", queue.get(timeout=60))
    child.join()
    show("changed", array)


if __name__ == "__main__":
    run(globals())
