/* What the programs in C++ have in common: a failed call ends them, and sums are printed. */
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>

#define CHECK(call) \
	do { \
		auto code = (call); \
		if (code) { \
			std::printf("%s: %d\n", #call, int(code)); \
			std::exit(1); \
		} \
	} while (0)

template <typename T> void show(const char *name, const T *device, size_t count)
{
	std::vector<T> host(count);
	CHECK(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
	uint64_t hash = 14695981039346656037ull;
	auto *bytes = reinterpret_cast<const uint8_t *>(host.data());
	for (size_t at = 0; at < count * sizeof(T); at++) hash = (hash ^ bytes[at]) * 1099511628211ull;
	std::printf("%s %016llx\n", name, (unsigned long long)hash);
}

template <typename T> T *device(const std::vector<T> &host)
{
	T *memory;
	CHECK(cudaMalloc(&memory, host.size() * sizeof(T)));
	CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
	return memory;
}

inline std::vector<float> numbers(size_t count)
{
	std::vector<float> host(count);
	for (size_t at = 0; at < count; at++) host[at] = float(at * 7919 % 1013) / 1013 - 0.5f;
	return host;
}
