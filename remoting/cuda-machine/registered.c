/* What a driver does while a stream waits for a word, and what copies of registered memory cost; the same program
 * natively and through Gantry. The driver is libcuda.so.1, opened here, so that no header is needed.
 *
 *     registered behaviour    what is ready while only a wait for a word is pending
 *     registered blocking     which calls of another thread return while a stream waits; with `copy` as a second
 *                             argument a copy of registered memory is queued in that stream, too
 *     registered queue [copy] how much work a waiting stream takes, what returns then, and whether 2,000 pieces of it end
 *     registered figures      times of copies: lines of a name, a value and a unit with tabs between them
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long Ptr;
typedef void *Handle;

static void *lib;
static Handle context, function, held, other, module;
static _Atomic uint32_t *gate; /* held waits until this is 1 */
static Ptr gate_at, device;
static char *registered, *pinned, *pageable;
enum { LARGE = 16 << 20, NON_BLOCKING = 1, NO_TIMING = 2, NOT_READY = 600 };

static void *find(const char *name)
{
	void *found = dlsym(lib, name);
	if (!found) {
		fprintf(stderr, "no %s\n", name);
		exit(2);
	}
	return found;
}
#define CU(name, ...) ((int (*)())find(#name))(__VA_ARGS__)
#define OK(name, ...)                                                         \
	do {                                                                      \
		int code = CU(name, __VA_ARGS__);                                     \
		if (code) {                                                           \
			printf(#name " failed: %d\n", code);                              \
			fflush(stdout);                                                   \
			_exit(1);                                                         \
		}                                                                     \
	} while (0)

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

static void nap(double seconds)
{
	usleep((useconds_t)(seconds * 1e6));
}

static const char ptx[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing(){ ret; }\n";

static void start(void)
{
	int number;
	lib = dlopen("libcuda.so.1", RTLD_NOW);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		exit(2);
	}
	OK(cuInit, 0);
	OK(cuDeviceGet, &number, 0);
	OK(cuCtxCreate_v2, &context, 0, number);
	OK(cuModuleLoadData, &module, ptx);
	OK(cuModuleGetFunction, &function, module, "nothing");
	OK(cuStreamCreate, &held, NON_BLOCKING);
	OK(cuStreamCreate, &other, NON_BLOCKING);
	OK(cuMemHostAlloc, (void **)&gate, (size_t)4096, 3);
	OK(cuMemHostGetDevicePointer_v2, &gate_at, gate, 0);
	OK(cuMemAlloc_v2, &device, (size_t)LARGE);
	registered = aligned_alloc(4096, LARGE);
	pageable = aligned_alloc(4096, LARGE);
	memset(registered, 1, LARGE);
	memset(pageable, 2, LARGE);
	OK(cuMemHostRegister_v2, registered, (size_t)LARGE, 0);
	OK(cuMemHostAlloc, (void **)&pinned, (size_t)LARGE, 0);
	memset(pinned, 3, LARGE);
	/* So that nothing is loaded or set up meanwhile. */
	OK(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, held, NULL, NULL);
	OK(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, other, NULL, NULL);
	OK(cuMemcpyHtoDAsync_v2, device, registered, (size_t)4096, held);
	OK(cuCtxSynchronize);
}

static void hold(Handle stream)
{
	atomic_store(gate, 0);
	OK(cuStreamWaitValue32_v2, stream, gate_at, 1, 0);
}

static void release(void)
{
	atomic_store(gate, 1);
}

/* What is ready while only a wait is pending. */

static void behaviour(void)
{
	Handle event, idle, used;
	const Handle legacy = (Handle)1;
	OK(cuEventCreate, &event, NO_TIMING);
	OK(cuStreamCreate, &idle, 0);
	OK(cuStreamCreate, &used, 0);
	OK(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, used, NULL, NULL);
	OK(cuCtxSynchronize);

	hold(held);
	nap(.05);
	printf("a stream in which only a wait for a word is pending: cuStreamQuery %d\n", CU(cuStreamQuery, held));
	OK(cuEventRecord, event, held);
	OK(cuStreamWaitEvent, other, event, 0);
	nap(.05);
	printf("a stream in which only a wait for an event is pending: cuStreamQuery %d\n", CU(cuStreamQuery, other));
	release();
	OK(cuCtxSynchronize);

	Handle blocking[] = { idle, used };
	const char *names[] = { "that never had work", "whose work is over" };
	for (int i = 0; i < 2; i++) {
		hold(legacy);
		nap(.05);
		printf("while the legacy stream waits, a blocking stream %s: cuStreamQuery %d", names[i],
		       CU(cuStreamQuery, blocking[i]));
		OK(cuEventRecord, event, blocking[i]);
		nap(.05);
		printf(", an event recorded in it: cuEventQuery %d", CU(cuEventQuery, event));
		printf(", then cuStreamQuery %d\n", CU(cuStreamQuery, blocking[i]));
		release();
		OK(cuCtxSynchronize);
		hold(blocking[i]);
		nap(.05);
		printf("while a blocking stream %s waits, the legacy stream: cuStreamQuery %d", names[i],
		       CU(cuStreamQuery, legacy));
		OK(cuEventRecord, event, legacy);
		nap(.05);
		printf(", an event recorded in it: cuEventQuery %d", CU(cuEventQuery, event));
		printf(", then cuStreamQuery %d\n", CU(cuStreamQuery, legacy));
		release();
		OK(cuCtxSynchronize);
	}
	fflush(stdout);
	/* Streams share the device's queues: which of them stand behind a stream that waits? */
	enum { MANY = 128 };
	Handle many[MANY];
	int behind = 0, first = -1;
	for (int i = 0; i < MANY; i++)
		OK(cuStreamCreate, &many[i], NON_BLOCKING);
	hold(held);
	for (int i = 0; i < MANY; i++)
		OK(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, many[i], NULL, NULL);
	nap(.5);
	for (int i = 0; i < MANY; i++)
		if (CU(cuStreamQuery, many[i])) {
			behind++;
			if (first < 0)
				first = i;
		}
	printf("of 128 streams with a launch each, %d stand behind a stream that waits (the first: number %d)\n", behind,
	       first);
	release();
	OK(cuCtxSynchronize);
}

/* Calls while a stream waits. Each is prepared before. */

static Handle h1, h2;
static Ptr p1;
static void *m1;
static char image[sizeof ptx];
static size_t s1, s2;

static void nothing(void *x)
{
	(void)x;
}

#define LAUNCH(stream) CU(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)

static int prepare(int n)
{
	switch (n) {
	case 1: return CU(cuMemAlloc_v2, &p1, (size_t)4 << 20);
	case 3: return CU(cuMemHostAlloc, &m1, (size_t)4 << 20, 0);
	case 4: m1 = aligned_alloc(4096, 4 << 20); return 0;
	case 5: m1 = aligned_alloc(4096, 4 << 20); return CU(cuMemHostRegister_v2, m1, (size_t)4 << 20, 0);
	case 7: return CU(cuModuleLoadData, &h1, ptx);
	case 9: return CU(cuStreamCreate, &h1, NON_BLOCKING);
	case 11: return CU(cuEventCreate, &h1, 0);
	case 23:
		CU(cuGraphCreate, &h1, 0);
		{
			struct { Handle f; unsigned g[3], b[3], s; void **p, **e; Handle k, c; } node = { function, { 1, 1, 1 }, { 1, 1, 1 }, 0, 0, 0, 0, 0 };
			CU(cuGraphAddKernelNode_v2, &h2, h1, NULL, (size_t)0, &node);
		}
		return 0;
	}
	return 0;
}

static const char *call(int n, int run, int *code)
{
	Handle x;
	int r = 0;
#define CASE(number, name, expression)                                        \
	case number:                                                              \
		if (run)                                                              \
			r = (expression);                                                 \
		*code = r;                                                            \
		return name;
	switch (n) {
		CASE(0, "cuMemAlloc", CU(cuMemAlloc_v2, &p1, (size_t)64 << 20))
		CASE(1, "cuMemFree", CU(cuMemFree_v2, p1))
		CASE(2, "cuMemHostAlloc", CU(cuMemHostAlloc, &m1, (size_t)4 << 20, 0))
		CASE(3, "cuMemFreeHost", CU(cuMemFreeHost, m1))
		CASE(4, "cuMemHostRegister", CU(cuMemHostRegister_v2, m1, (size_t)4 << 20, 3))
		CASE(5, "cuMemHostUnregister", CU(cuMemHostUnregister, m1))
		CASE(6, "cuModuleLoadData", CU(cuModuleLoadData, &h1, image))
		CASE(7, "cuModuleUnload", CU(cuModuleUnload, h1))
		CASE(8, "cuStreamCreate", CU(cuStreamCreate, &h1, NON_BLOCKING))
		CASE(9, "cuStreamDestroy of another stream", CU(cuStreamDestroy_v2, h1))
		CASE(10, "cuEventCreate", CU(cuEventCreate, &h1, 0))
		CASE(11, "cuEventQuery of another event", CU(cuEventQuery, h1))
		CASE(12, "cuStreamQuery of the stream", CU(cuStreamQuery, held))
		CASE(13, "cuStreamQuery of another stream", CU(cuStreamQuery, other))
		CASE(14, "launch in another stream, cuStreamSynchronize", (LAUNCH(other), CU(cuStreamSynchronize, other)))
		CASE(15, "function in another stream, cuStreamSynchronize",
		     (CU(cuLaunchHostFunc, other, nothing, NULL), CU(cuStreamSynchronize, other)))
		CASE(16, "registered copy to the device in another stream, cuStreamSynchronize",
		     (CU(cuMemcpyHtoDAsync_v2, device + 8192, registered + 8192, (size_t)4096, other), CU(cuStreamSynchronize, other)))
		CASE(17, "registered copy to the host in another stream, cuStreamSynchronize",
		     (CU(cuMemcpyDtoHAsync_v2, registered + 8192, device + 8192, (size_t)4096, other), CU(cuStreamSynchronize, other)))
		CASE(18, "cuMemcpyHtoD, pageable", CU(cuMemcpyHtoD_v2, device + 8192, pageable, (size_t)1 << 20))
		CASE(19, "cuMemcpyDtoH, pageable", CU(cuMemcpyDtoH_v2, pageable, device + 8192, (size_t)1 << 20))
		CASE(20, "cuMemcpyHtoD, registered", CU(cuMemcpyHtoD_v2, device + 8192, registered + 8192, (size_t)4096))
		CASE(21, "cuMemsetD8", CU(cuMemsetD8_v2, device + 8192, 1, (size_t)4096))
		CASE(22, "cuMemAllocAsync, cuMemFreeAsync in another stream",
		     (CU(cuMemAllocAsync, &p1, (size_t)4 << 20, other), CU(cuMemFreeAsync, p1, other), CU(cuStreamSynchronize, other)))
		CASE(23, "cuGraphInstantiate, cuGraphLaunch in another stream",
		     (CU(cuGraphInstantiateWithFlags, &x, h1, 0ull), CU(cuGraphLaunch, x, other), CU(cuStreamSynchronize, other)))
		CASE(24, "cuMemGetInfo", CU(cuMemGetInfo_v2, &s1, &s2))
		CASE(25, "cuStreamSynchronize of the stream", CU(cuStreamSynchronize, held))
		CASE(26, "cuCtxSynchronize", CU(cuCtxSynchronize))
		CASE(27, "cuStreamDestroy of the stream", CU(cuStreamDestroy_v2, held))
		CASE(28, "cuCtxCreate of another context", CU(cuCtxCreate_v2, &x, 0, 0))
		CASE(29, "registered copy of 16 MiB to the device in the stream",
		     CU(cuMemcpyHtoDAsync_v2, device, registered, (size_t)LARGE, held))
		CASE(30, "registered copy of 16 MiB to the host in the stream",
		     CU(cuMemcpyDtoHAsync_v2, registered, device, (size_t)LARGE, held))
	}
	return NULL;
}

struct asked {
	int number, code, current;
	double took;
	_Atomic int is_done;
};

static void *ask(void *of)
{
	struct asked *asked = of;
	CU(cuCtxSetCurrent, context);
	double begin = now();
	call(asked->number, 1, &asked->code);
	asked->took = now() - begin;
	atomic_store(&asked->is_done, 1);
	return NULL;
}

/* Whether it happens within so many seconds. */
static int within(double seconds, _Atomic int *flag)
{
	for (double end = now() + seconds; now() < end; nap(.001))
		if (atomic_load(flag))
			return 1;
	return 0;
}

static void one(int number, int copy)
{
	struct asked asked = { .number = number };
	pthread_t thread;
	memcpy(image, ptx, sizeof ptx);
	const char *name = call(number, 0, &asked.code);
	if (prepare(number)) {
		printf("%s: not prepared\n", name);
		return;
	}
	hold(held);
	if (copy)
		OK(cuMemcpyHtoDAsync_v2, device, registered, (size_t)4096, held);
	nap(.02);
	pthread_create(&thread, NULL, ask, &asked);
	int returned = within(1, &asked.is_done);
	release();
	if (!returned && !within(5, &asked.is_done)) {
		printf("%s: HANGS\n", name);
		fflush(stdout);
		_exit(4);
	}
	if (number < 27 || number > 28)
		OK(cuStreamSynchronize, held);
	if (returned)
		printf("%s: returns (%d) after %.2f ms\n", name, asked.code, asked.took * 1e3);
	else
		printf("%s: waits for the stream (%d)\n", name, asked.code);
	pthread_join(thread, NULL);
}


/* Each call in a process of its own: one that hangs ends only itself. */
static void blocking(int copy)
{
	int code;
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (int number = 0; call(number, 0, &code); number++) {
		pid_t child = fork();
		if (!child) {
			alarm(25);
			start();
			one(number, copy);
			fflush(stdout);
			_exit(0);
		}
		int status;
		waitpid(child, &status, 0);
		if (!WIFEXITED(status))
			printf("%s: ended by signal %d\n", call(number, 0, &code), WTERMSIG(status));
	}
}

static _Atomic int count;
static _Atomic int all_in;
enum { WANTED = 2000 };
static const char *const kinds_of_work[] = { "launches", "copies of 4 KiB of pinned memory", "copies of 4 KiB of registered memory",
	"memsets", "event records", "waits for words", "functions", "graphs of ten kernels" };
enum { KINDS = sizeof kinds_of_work / sizeof *kinds_of_work };
static Handle ten, event;

static int work(int kind)
{
	switch (kind) {
	case 0: return LAUNCH(held);
	case 1: return CU(cuMemcpyHtoDAsync_v2, device, pinned, (size_t)4096, held);
	case 2: return CU(cuMemcpyHtoDAsync_v2, device, registered, (size_t)4096, held);
	case 3: return CU(cuMemsetD8Async, device, 1, (size_t)4096, held);
	case 4: return CU(cuEventRecord, event, held);
	case 5: return CU(cuStreamWaitValue32_v2, held, gate_at, 1, 0);
	case 6: return CU(cuLaunchHostFunc, held, nothing, NULL);
	default: return CU(cuGraphLaunch, ten, held);
	}
}

static void *fill(void *kind)
{
	CU(cuCtxSetCurrent, context);
	for (int i = 0; i < WANTED; i++) {
		int code = work(*(int *)kind);
		if (code) {
			printf("%s: number %d failed: %d\n", kinds_of_work[*(int *)kind], i, code);
			break;
		}
		atomic_fetch_add(&count, 1);
	}
	atomic_store(&all_in, 1);
	return NULL;
}

/* Work behind a wait: how much until the caller waits, what returns then, and whether all of it ends. */
static void queue(int copy)
{
	pthread_t filler;
	const int calls[] = { 11, 12, 13, 10, 0, 14, 20, 24 };
	struct { Handle f; unsigned g[3], b[3], s; void **p, **e; Handle k, c; } node = { function, { 1, 1, 1 }, { 1, 1, 1 }, 0, 0, 0, 0, 0 };
	Handle graph, last;
	setvbuf(stdout, NULL, _IOLBF, 0);
	prepare(11);
	OK(cuEventCreate, &event, NO_TIMING);
	OK(cuGraphCreate, &graph, 0);
	for (int i = 0; i < 10; i++)
		OK(cuGraphAddKernelNode_v2, &last, graph, i ? &last : NULL, (size_t)(i > 0), &node);
	OK(cuGraphInstantiateWithFlags, &ten, graph, 0ull);
	OK(cuGraphLaunch, ten, held);
	OK(cuStreamSynchronize, held);
	for (int kind = 0; kind < KINDS; kind++) {
		atomic_store(&count, 0);
		atomic_store(&all_in, 0);
		hold(held);
		if (copy)
			OK(cuMemcpyHtoDAsync_v2, device, registered, (size_t)4096, held);
		double begin = now();
		pthread_create(&filler, NULL, fill, &kind);
		for (int seen = -1; seen != atomic_load(&count) && !atomic_load(&all_in);) {
			seen = atomic_load(&count);
			nap(.3);
		}
		printf("%s: the caller has enqueued %d of %d while the stream waits\n", kinds_of_work[kind], atomic_load(&count), WANTED);
		static struct asked asked[8];
		pthread_t threads[8];
		for (int i = 0; i < 8 && kind == 0; i++) {
			asked[i].number = calls[i];
			pthread_create(&threads[i], NULL, ask, &asked[i]);
			int returned = within(.2, &asked[i].is_done), code;
			const char *name = call(calls[i], 0, &code);
			if (returned)
				printf("meanwhile %s: returns (%d) after %.2f ms\n", name, asked[i].code, asked[i].took * 1e3);
			else
				printf("meanwhile %s: waits\n", name);
		}
		release();
		if (!within(10, &all_in)) {
			printf("%s: HANGS at %d\n", kinds_of_work[kind], atomic_load(&count));
			_exit(4);
		}
		OK(cuStreamSynchronize, held);
		pthread_join(filler, NULL);
		printf("%s: all done, %.0f ms in all\n", kinds_of_work[kind], (now() - begin) * 1e3);
	}
}

/* Figures. */

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

static void figures(void)
{
	struct { const char *name; char *at; } kinds[] = { { "registered", registered }, { "pinned", pinned }, { "pageable", pageable } };
	struct { const char *name; size_t size; int times; } sizes[] = { { "4 KiB", 4096, 1000 }, { "64 KiB", 65536, 1000 }, { "1 MiB", 1 << 20, 300 }, { "16 MiB", LARGE, 40 } };
	static double all[1000];
	for (int k = 0; k < 3; k++)
		for (int s = 0; s < 4; s++)
			for (int up = 1; up >= 0; up--)
				for (int way = 0; way < 3; way++) {
					/* 0: the stream has no work. 1: behind a launch. 2: eight copies, then one wait. */
					int copies = way == 2 ? 8 : 1, times = sizes[s].times / copies;
					size_t size = sizes[s].size;
					for (int i = -10; i < times; i++) {
						double begin = now();
						if (way == 1)
							LAUNCH(other);
						for (int c = 0; c < copies; c++) {
							int code = up ? CU(cuMemcpyHtoDAsync_v2, device, kinds[k].at, size, other)
							              : CU(cuMemcpyDtoHAsync_v2, kinds[k].at, device, size, other);
							if (code) {
								fprintf(stderr, "copy failed: %d\n", code);
								exit(1);
							}
						}
						OK(cuStreamSynchronize, other);
						if (i >= 0)
							all[i] = (now() - begin) / copies * 1e6;
					}
					qsort(all, times, sizeof all[0], compare);
					const char *ways[] = { "alone", "behind a launch", "each of eight" };
					const char *where = up ? "to the device" : "to the host";
					printf("%s %s %s, %s\t%.2f\tus\n", kinds[k].name, sizes[s].name, where, ways[way], all[times / 2]);
					if (way < 2)
						printf("%s %s %s, %s, P99\t%.2f\tus\n", kinds[k].name, sizes[s].name, where, ways[way], all[times * 99 / 100]);
				}
}

int main(int arguments, char **argument)
{
	const char *what = arguments > 1 ? argument[1] : "";
	int copy = arguments > 2 && !strcmp(argument[2], "copy");
	if (!strcmp(what, "blocking")) {
		blocking(copy);
		return 0;
	}
	if (strcmp(what, "behaviour") && strcmp(what, "queue") && strcmp(what, "figures")) {
		fprintf(stderr, "usage: %s behaviour|blocking|queue|figures [copy]\n", argument[0]);
		return 2;
	}
	start();
	/* A hang ends it. */
	alarm(100);
	if (!strcmp(what, "behaviour"))
		behaviour();
	else if (!strcmp(what, "queue"))
		queue(copy);
	else
		figures();
	return 0;
}
