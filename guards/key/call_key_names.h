#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

// The names that calls have in text. Private to call_key_text.cc and call_key_parse.cc.
namespace eagercache::call_key_names {

// Indexed by number. A name is torch's own: getattr(torch, name).
// clang-format off
inline constexpr std::array kScalarTypeNames = {
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16",
    "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float8_e5m2",
    "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64",
    "uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
    "int1", "int2", "int3", "int4", "int5", "int6", "int7",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "bcomplex32"};
// clang-format on

inline constexpr std::array kLayoutNames = {"strided",    "sparse_coo", "sparse_csr", "_mkldnn",
                                            "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};

inline constexpr std::array kMemoryFormatNames = {"contiguous_format", "preserve_format",
                                                  "channels_last", "channels_last_3d"};

inline constexpr std::array kDeviceTypeNames = {
    "cpu",  "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip",
    "fpga", "maia", "xla",    "vulkan", "metal",  "xpu",   "mps",
    "meta", "hpu",  "ve",     "lazy",   "ipu",    "mtia",  "privateuseone"};

template <std::size_t kCount>
std::string name_of(const std::array<const char*, kCount>& names, std::int64_t number,
                    std::string_view unknown) {
  if (number >= 0 && static_cast<std::size_t>(number) < kCount) {
    return names[static_cast<std::size_t>(number)];
  }
  return std::string(unknown) + "<" + std::to_string(number) + ">";
}

}  // namespace eagercache::call_key_names
