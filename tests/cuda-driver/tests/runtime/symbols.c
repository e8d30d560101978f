/* Constants, variables and managed variables. */
#include "runtime.h"
#include "kernels.h"

static struct wrapper image = {0x466243b1, 1, NULL, NULL};
static void **registered;
static int factor[4], counter, unknown;
static int *total;

static void symbols(void) {}

__attribute__((constructor)) static void enter(void) {
    image.data = fat_binary(SYMBOLS);
    registered = __cudaRegisterFatBinary(&image);
    __cudaRegisterFunction(registered, (char *)symbols, "symbols", "symbols", -1, 0, 0, 0, 0, 0);
    __cudaRegisterVar(registered, (char *)factor, "factor", "factor", 0, sizeof factor, 1, 0);
    __cudaRegisterVar(registered, (char *)&counter, "counter", "counter", 0, sizeof counter, 0, 0);
    __cudaRegisterManagedVar(registered, (void **)&total, "total", "total", 0, sizeof *total, 0, 0);
    __cudaRegisterFatBinaryEnd(registered);
}

__attribute__((destructor)) static void leave(void) { __cudaUnregisterFatBinary(registered); }

int main(void) {
    /* The compiler's host code asks for this before the first use of a managed variable. */
    HOLDS(total == NULL);
    HOLDS(__cudaInitModule(registered) != 0);
    HOLDS(total != NULL && *total == 5);

    int values[4] = {2, 3, 4, 5}, back[4] = {0};
    OK(cudaMemcpyToSymbol(factor, values, sizeof values, 0, HostToDevice));
    OK(cudaMemcpyFromSymbol(back, factor, 8, 8, DeviceToHost));
    HOLDS(back[0] == 4 && back[1] == 5);

    int from[8] = {1, 2, 3, 4, 5, 6, 7, 8}, to[8], *in, *out, count = 8;
    OK(cudaMalloc(&in, sizeof from));
    OK(cudaMalloc(&out, sizeof to));
    OK(cudaMemcpy(in, from, sizeof from, Default));
    void *arguments[] = {&in, &out, &count};
    OK(cudaLaunchKernel((void *)symbols, of(2), of(4), arguments, 0, NULL));
    OK(cudaMemcpy(to, out, sizeof to, Default));
    for (int i = 0; i < 8; i++) HOLDS(to[i] == from[i] * values[i % 4]);
    OK(cudaMemcpyFromSymbol(&counter, &counter, sizeof counter, 0, DeviceToHost));
    HOLDS(counter == 3 + 8);
    HOLDS(*total == 5 + 36);

    void *at;
    size_t size;
    OK(cudaGetSymbolAddress(&at, &counter));
    OK(cudaMemset(at, 0, sizeof counter));
    OK(cudaMemcpyFromSymbol(&counter, &counter, sizeof counter, 0, Default));
    HOLDS(counter == 0);
    OK(cudaGetSymbolSize(&size, factor));
    HOLDS(size == sizeof factor);
    OK(cudaGetSymbolAddress(&at, &total));
    HOLDS(at == total);

    IS(InvalidSymbol, cudaGetSymbolAddress(&at, &unknown));
    IS(InvalidValue, cudaMemcpyToSymbol(factor, values, sizeof values, 4, HostToDevice));
    IS(InvalidDirection, cudaMemcpyToSymbol(factor, values, 4, 0, DeviceToHost));
    puts("done");
    return 0;
}
