// A container of two float inputs of one size: their sum, and the first of them as it is. Fails for
// 13 elements. Linked as container.py's SEAMS have real ones linked.
#include <cstddef>
#include <cstdint>

namespace {

using Handle = void*;
using Make = std::int32_t (*)(std::int64_t, const std::int64_t*, const std::int64_t*, std::int32_t,
                              std::int32_t, std::int32_t, Handle*);
using Drop = std::int32_t (*)(Handle);

Make make_tensor = nullptr;
Drop drop_tensor = nullptr;

}  // namespace

extern "C" {

std::int32_t aoti_torch_empty_strided(std::int64_t, const std::int64_t*, const std::int64_t*,
                                      std::int32_t, std::int32_t, std::int32_t, Handle*);
std::int32_t aoti_torch_delete_tensor_object(Handle);
std::int32_t aoti_torch_get_data_ptr(Handle, void**);
std::int32_t aoti_torch_get_numel(Handle, std::int64_t*);
std::int32_t aoti_torch_dtype_float32();

}  // extern "C"

namespace {

Handle made(const std::int64_t* size) {
  constexpr std::int64_t kStride = 1;
  const std::int32_t dtype = aoti_torch_dtype_float32();
  Handle handle = nullptr;
  if (make_tensor == nullptr || make_tensor(1, size, &kStride, dtype, 0, -1, &handle) != 0) {
    aoti_torch_empty_strided(1, size, &kStride, dtype, 0, -1, &handle);
  }
  return handle;
}

void drop(Handle handle) {
  if (drop_tensor == nullptr || drop_tensor(handle) != 0) {
    aoti_torch_delete_tensor_object(handle);
  }
}

float* data(Handle handle) {
  void* pointer = nullptr;
  aoti_torch_get_data_ptr(handle, &pointer);
  return static_cast<float*>(pointer);
}

std::int32_t count(std::size_t* result, std::size_t value) {
  *result = value;
  return 0;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED void eagercache_connect(Make make, Drop drop) {
  make_tensor = make;
  drop_tensor = drop;
}

EXPORTED std::int32_t AOTInductorModelContainerCreateWithDevice(Handle* container, std::size_t,
                                                                const char*, const char*) {
  *container = &make_tensor;
  return 0;
}

EXPORTED std::int32_t AOTInductorModelContainerGetNumInputs(Handle, std::size_t* result) {
  return count(result, 2);
}

EXPORTED std::int32_t AOTInductorModelContainerGetNumOutputs(Handle, std::size_t* result) {
  return count(result, 2);
}

EXPORTED std::int32_t AOTInductorModelContainerGetNumConstants(Handle, std::size_t* result) {
  return count(result, 0);
}

EXPORTED std::int32_t AOTInductorModelContainerRunSingleThreaded(Handle, Handle* inputs,
                                                                 std::size_t, Handle* outputs,
                                                                 std::size_t, void*, void*) {
  std::int64_t size = 0;
  aoti_torch_get_numel(inputs[0], &size);
  Handle scratch = made(&size);
  for (std::int64_t i = 0; i < size; ++i) {
    data(scratch)[i] = data(inputs[1])[i];
  }
  drop(inputs[1]);
  outputs[0] = made(&size);
  for (std::int64_t i = 0; i < size; ++i) {
    data(outputs[0])[i] = data(inputs[0])[i] + data(scratch)[i];
  }
  drop(scratch);
  outputs[1] = inputs[0];
  return size == 13 ? 1 : 0;
}

}  // extern "C"
