// NVRTC: a kernel from text, its error messages, and a template; linked and launched by the driver API.
#include <cuda.h>
#include <nvrtc.h>
#include <string>
#include "check.h"

int main()
{
	nvrtcProgram program;
	nvrtcResult refused;
	size_t size;
	CHECK(nvrtcCreateProgram(&program, "__global__ void wrong(int *x) { y[0] = 1; }", "wrong.cu", 0, nullptr, nullptr));
	refused = nvrtcCompileProgram(program, 0, nullptr);
	CHECK(nvrtcGetProgramLogSize(program, &size));
	std::string log(size, 0);
	CHECK(nvrtcGetProgramLog(program, log.data()));
	std::printf("refused %d: %s\n", refused, log.c_str());
	CHECK(nvrtcDestroyProgram(&program));
	const char *text = "template <typename T> __global__ void fill(T *x, T value) { x[threadIdx.x] = value * T(threadIdx.x); }";
	CHECK(nvrtcCreateProgram(&program, text, "fill.cu", 0, nullptr, nullptr));
	CHECK(nvrtcAddNameExpression(program, "fill<float>"));
	const char *options[] = {"--gpu-architecture=compute_80"}, *name;
	CHECK(nvrtcCompileProgram(program, 1, options));
	CHECK(nvrtcGetLoweredName(program, "fill<float>", &name));
	std::printf("name %s\n", name);
	CHECK(nvrtcGetPTXSize(program, &size));
	std::string ptx(size, 0);
	CHECK(nvrtcGetPTX(program, ptx.data()));
	float *x, value = 1.5f;
	CHECK(cudaMalloc(&x, 1024));
	CUmodule module;
	CUfunction fill;
	CHECK(cuModuleLoadData(&module, ptx.c_str()));
	CHECK(cuModuleGetFunction(&fill, module, name));
	void *arguments[] = {&x, &value};
	CHECK(cuLaunchKernel(fill, 1, 1, 1, 256, 1, 1, 0, nullptr, arguments, nullptr));
	CHECK(cudaDeviceSynchronize());
	show("x", x, 256);
	CHECK(nvrtcDestroyProgram(&program));
}
