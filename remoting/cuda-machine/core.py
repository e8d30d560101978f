"""cuda.core and what it uses of cuda.bindings: NVRTC, nvJitLink and the driver. What kernels leave in memory."""
import numpy
from cuda.core import (
    Device, LaunchConfig, LegacyPinnedMemoryResource, Linker, LinkerOptions, Program, ProgramOptions, launch)

code = r"""
extern "C" __device__ float twice(float);
extern "C" __global__ void scale(float* to, const float* from, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] = twice(from[at]) + at;
}
"""
twice = r"""extern "C" __device__ float twice(float x) { return 2 * x; }"""
device = Device()
device.set_current()
arch = "sm_" + "".join(map(str, device.compute_capability))
stream = device.create_stream()
options = ProgramOptions(arch=arch, relocatable_device_code=True)
parts = [Program(text, code_type="c++", options=options).compile("ptx") for text in (code, twice)]
linked = Linker(*parts, options=LinkerOptions(arch=arch)).link("cubin")
kernel = linked.get_kernel("scale")
count = 1 << 20
size = 4 * count


def mapped(buffer):
    return numpy.from_dlpack(buffer).view(numpy.float32)


pinned = LegacyPinnedMemoryResource()
source, result = pinned.allocate(size), pinned.allocate(size)
mapped(source)[:] = numpy.arange(count, dtype=numpy.float32) % 1000
inputs, outputs = device.allocate(size, stream=stream), device.allocate(size, stream=stream)
source.copy_to(inputs, stream=stream)
launch(stream, LaunchConfig(grid=(count // 256,), block=(256,)), kernel, outputs, inputs, numpy.int32(count))
outputs.copy_to(result, stream=stream)
stream.sync()
seen = mapped(result)
numpy.testing.assert_array_equal(seen, 2 * mapped(source) + numpy.arange(count, dtype=numpy.float32))
start, end = (device.create_event() for _ in range(2))
stream.record(start)
stream.record(end)
stream.sync()
print("loss", 0, seen.sum(dtype=numpy.float64), kernel.attributes.num_regs, device.name)
