// A libcuda.so.1 that runs nothing: it writes what it is asked for to stdout, one JSON object a line. Declared by the real cuda.h, so that
// a prototype or a value that the caller states otherwise shows. FAKE_CAPABILITY ("9.0"), FAKE_CAPTURING and FAKE_FAIL (a function's name)
// set its answers. FAKE_KERNELS names the kernels and counts their parameters, Arguments and tensor maps: "separable2d 1 2 pack_weights 1 0".
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace {

int contexts = 0;  // pushed and not popped

CUresult answer(char const* function) {
  char const* fail = std::getenv("FAKE_FAIL");
  return fail && !std::strcmp(fail, function) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

template <class T>
std::string list(std::vector<T> const& values) {
  std::string text;
  for (T value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}
template <class T>
std::string list(T const* values, int count) {
  return list(std::vector<T>(values, values + count));
}

constexpr int kArgumentsBytes = 10 * 8 + 8 * 4;

struct Kernel {
  std::string name;
  int arguments, maps;
};
std::vector<Kernel> kernels() {
  std::vector<Kernel> result;
  std::istringstream text(std::getenv("FAKE_KERNELS"));
  for (Kernel kernel; text >> kernel.name >> kernel.arguments >> kernel.maps;) result.push_back(kernel);
  return result;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return answer("cuInit"); }

CUresult cuGetErrorString(CUresult, char const** text) {
  *text = "a fake error";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return answer("cuDeviceGet");
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  char const* capability = std::getenv("FAKE_CAPABILITY");
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = capability[0] - '0';
  else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = capability[2] - '0';
  else if (attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *value = 132;
  else return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = reinterpret_cast<CUcontext>(0x10);
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext) {  // cuda.h makes the name cuCtxPushCurrent_v2
  ++contexts;
  return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext*) {
  --contexts;
  return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = std::getenv("FAKE_CAPTURING") ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary* library, void const* code, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  *library = reinterpret_cast<CUlibrary>(0x20);
  auto const* bytes = static_cast<unsigned char const*>(code);
  std::printf("{\"call\": \"load\", \"head\": %s, \"contexts\": %d}\n", list(bytes, 64).c_str(), contexts);
  return answer("cuLibraryLoadData");
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, char const* name) {
  auto const known = kernels();
  for (size_t i = 0; i < known.size(); ++i) {
    if (known[i].name != name) continue;
    *kernel = reinterpret_cast<CUkernel>(i + 1);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_NOT_FOUND;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  std::printf("{\"call\": \"reserve\", \"kernel\": %d, \"bytes\": %d}\n", int(reinterpret_cast<size_t>(kernel)), value);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, cuuint64_t const* extents,
                                cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* every, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  std::printf("{\"call\": \"encode\", \"address\": %zu, \"extents\": %s, \"strides\": %s, \"box\": %s, \"every\": %s, "
              "\"enums\": %s}\n",
              reinterpret_cast<size_t>(address), list(extents, rank).c_str(), list(strides, rank - 1).c_str(), list(box, rank).c_str(),
              list(every, rank).c_str(), list<int>({type, interleave, swizzle, promotion, fill}).c_str());
  std::memset(map, 0, sizeof *map);
  map->opaque[0] = reinterpret_cast<size_t>(address);
  return answer("cuTensorMapEncodeTiled");
}

CUresult cuLaunchKernel(CUfunction kernel, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
                        unsigned shared, CUstream stream, void** parameters, void** extra) {
  Kernel const& launched = kernels()[reinterpret_cast<size_t>(kernel) - 1];
  std::string arguments;
  for (int i = 0; i < launched.arguments; ++i)
    arguments += (i ? ", " : "") + list(static_cast<unsigned char*>(parameters[i]), kArgumentsBytes);
  std::vector<size_t> maps;
  for (int i = 0; i < launched.maps; ++i) maps.push_back(*static_cast<size_t*>(parameters[launched.arguments + i]));
  std::printf("{\"call\": \"launch\", \"kernel\": %d, \"grid\": %s, \"block\": %s, \"shared\": %u, \"stream\": %zu, \"contexts\": %d, "
              "\"arguments\": [%s], \"maps\": %s}\n",
              int(reinterpret_cast<size_t>(kernel)), list<unsigned>({x, y, z}).c_str(),
              list<unsigned>({threads_x, threads_y, threads_z}).c_str(), shared, reinterpret_cast<size_t>(stream),
              extra ? -1 : contexts, arguments.c_str(), list(maps).c_str());
  return answer("cuLaunchKernel");
}

}  // extern "C"
