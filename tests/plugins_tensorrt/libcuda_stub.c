/* Stands for NVIDIA's driver library under the real cuda-bindings: device memory is the processor's, a kernel writes down
   the arguments that it is launched with (pointer, i32, i64, f32 and two pointers), and everything is said on stdout. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SAY(...) do { printf(__VA_ARGS__); fflush(stdout); } while (0)
typedef uint64_t address;
typedef void *handle;

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    *found = dlsym(RTLD_DEFAULT, name);
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub"); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which; return 0; }
int cuDevicePrimaryCtxRetain(handle *context, int device) { *context = (handle)0x70; return 0; }
int cuDevicePrimaryCtxRelease(int device) { SAY("release %d\n", device); return 0; }
int cuCtxSetCurrent(handle context) { SAY("current %p\n", context); return 0; }
int cuMemGetInfo(size_t *left, size_t *total) { *left = 3000; *total = 8000; return 0; }
int cuGetErrorName(int error, const char **text) { *text = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_SOME"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "some words"; return 0; }

int cuMemAlloc(address *found, size_t size) {
    if (size > 1 << 20) return 2;
    *found = (address)malloc(size);
    return 0;
}
int cuMemFree(address at) { free((void *)at); return 0; }
int cuMemHostAlloc(void **found, size_t size, unsigned flags) { *found = malloc(size); return 0; }
int cuMemFreeHost(void *at) { free(at); return 0; }
int cuMemcpyHtoDAsync(address to, const void *from, size_t size, handle stream) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoHAsync(void *to, address from, size_t size, handle stream) { memcpy(to, (void *)from, size); return 0; }
int cuMemcpyDtoDAsync(address to, address from, size_t size, handle stream) { memcpy((void *)to, (void *)from, size); return 0; }
int cuMemsetD8Async(address at, unsigned char value, size_t size, handle stream) { memset((void *)at, value, size); return 0; }

int cuStreamCreate(handle *stream, unsigned flags) { SAY("stream %u\n", flags); *stream = (handle)0x11; return 0; }
int cuStreamDestroy(handle stream) { return 0; }
int cuStreamSynchronize(handle stream) { return stream == (handle)0x11 ? 0 : 400; }
int cuStreamWaitEvent(handle stream, handle event, unsigned flags) { SAY("wait %p %p\n", stream, event); return 0; }
int cuEventCreate(handle *event, unsigned flags) { SAY("event %u\n", flags); *event = (handle)0x12; return 0; }
int cuEventDestroy(handle event) { return 0; }
int cuEventRecord(handle event, handle stream) { return 0; }
int cuEventSynchronize(handle event) { return 0; }
int cuEventElapsedTime(float *ms, handle start, handle end) { *ms = 1.5f; return 0; }

int cuModuleLoadData(handle *module, const void *image) { SAY("image %.5s\n", (const char *)image); *module = (handle)0x13; return 0; }
int cuModuleUnload(handle module) { return 0; }
int cuModuleGetFunction(handle *found, handle module, const char *name) { SAY("kernel %s\n", name); *found = (handle)0x14; return 0; }
int cuFuncSetAttribute(handle function, int which, int value) { SAY("attribute %d %d\n", which, value); return 0; }
int cuLaunchKernel(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, handle stream, void **given, void **extra) {
    SAY("launch %p %u %u %u / %u %u %u, %u bytes, %p, extra %p\n", function, gx, gy, gz, bx, by, bz, shared, stream, (void *)extra);
    SAY("arguments %llx %d %lld %g %llx %llx\n", *(unsigned long long *)given[0], *(int *)given[1], *(long long *)given[2],
        *(float *)given[3], *(unsigned long long *)given[4], *(unsigned long long *)given[5]);
    return 0;
}

int cuStreamBeginCapture(handle stream, int mode) { SAY("capture %d\n", mode); return 0; }
int cuStreamEndCapture(handle stream, handle *graph) { *graph = (handle)0x15; return 0; }
int cuGraphInstantiateWithFlags(handle *made, handle graph, unsigned long long flags) { SAY("graph %p\n", graph); *made = (handle)0x16; return 0; }
int cuGraphDestroy(handle graph) { SAY("graph destroyed %p\n", graph); return 0; }
int cuGraphLaunch(handle graph, handle stream) { SAY("graph launched %p\n", graph); return 0; }
int cuGraphExecDestroy(handle graph) { return 0; }
