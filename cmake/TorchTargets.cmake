# Torch, located through the interpreter that will import the module. Defines Torch::Torch (headers as
# SYSTEM, libtorch, libtorch_cpu, libc10) and EAGERCACHE_TORCH_* facts for the build information.
#
# TorchConfig.cmake is not used: for a CUDA build of torch it demands a CUDA toolkit at configure time,
# and we compile no CUDA code and name no CUDA symbol. Device calls are found at run time.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(torch_probe [=[
import json, os, sys
try:
    import torch
    from torch.utils.cpp_extension import include_paths
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("\n".join([
    torch.__version__,
    str(torch.version.cuda or ""),
    str(int(torch.compiled_with_cxx11_abi())),
    os.path.join(os.path.dirname(torch.__file__), "lib"),
    os.path.join(os.path.dirname(torch.__file__), "include"),
    os.path.join(os.path.dirname(torch.__file__), "include", "torch", "csrc", "api", "include"),
    str(torch.version.git_version),
    str(torch.version.debug),
    str(torch.version.hip),
]))
]=])
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "${torch_probe}"
  OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  if(SKBUILD)
    set(torch_remedy "pip builds in an environment of its own, which has no torch. In the environment whose torch is "
      "meant: pip install scikit-build-core pybind11 cmake ninja, then pip install -v --no-build-isolation . "
      "which compiles for minutes and, with -v, says how far it is.")
  else()
    set(torch_remedy "Install torch there, pass -DPython_EXECUTABLE=<another python>, or build without it: "
      "-DEAGERCACHE_WITH_TORCH=OFF")
  endif()
  string(CONCAT torch_remedy ${torch_remedy})
  message(FATAL_ERROR "torch could not be imported by ${Python_EXECUTABLE}: ${torch_error}\n${torch_remedy}")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 EAGERCACHE_TORCH_VERSION)
list(GET torch_facts 1 EAGERCACHE_TORCH_CUDA)
list(GET torch_facts 2 EAGERCACHE_TORCH_CXX11_ABI)
list(GET torch_facts 3 torch_lib_dir)
list(GET torch_facts 4 torch_include_dir)
list(GET torch_facts 5 torch_api_include_dir)
list(GET torch_facts 6 EAGERCACHE_TORCH_GIT)
list(GET torch_facts 7 EAGERCACHE_TORCH_DEBUG)
list(GET torch_facts 8 EAGERCACHE_TORCH_HIP)
set(EAGERCACHE_TORCH_INCLUDE "${torch_include_dir}")

string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" torch_minor "${EAGERCACHE_TORCH_VERSION}")
set(EAGERCACHE_TORCH_MAJOR ${CMAKE_MATCH_1})
set(EAGERCACHE_TORCH_MINOR ${CMAKE_MATCH_2})
if(EAGERCACHE_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "eagercache needs torch 2.11 or later; ${Python_EXECUTABLE} has "
                      "${EAGERCACHE_TORCH_VERSION}.")
endif()
if(EAGERCACHE_TORCH_CXX11_ABI EQUAL 0)
  message(FATAL_ERROR "This torch was built with the old C++ ABI, which eagercache does not support.")
endif()
message(STATUS "torch ${EAGERCACHE_TORCH_VERSION} (CUDA '${EAGERCACHE_TORCH_CUDA}') of ${Python_EXECUTABLE}")

add_library(Torch::Torch INTERFACE IMPORTED)
target_include_directories(Torch::Torch SYSTEM INTERFACE
  "${torch_include_dir}" "${torch_api_include_dir}")
target_compile_definitions(Torch::Torch INTERFACE
  EAGERCACHE_TORCH_MAJOR=${EAGERCACHE_TORCH_MAJOR} EAGERCACHE_TORCH_MINOR=${EAGERCACHE_TORCH_MINOR})
# libtorch exports parts of a std::filesystem of its own, which crash in a program that mixes them with
# the standard library's: the latter is looked up first.
if(EAGERCACHE_PORTABLE)
  target_link_libraries(Torch::Torch INTERFACE eagercache_older)
else()
  target_link_libraries(Torch::Torch INTERFACE -lstdc++)
endif()
foreach(name torch torch_cpu c10)
  find_library(torch_library_${name} ${name} PATHS "${torch_lib_dir}" NO_DEFAULT_PATH REQUIRED)
  add_library(Torch::${name} UNKNOWN IMPORTED)
  set_target_properties(Torch::${name} PROPERTIES IMPORTED_LOCATION "${torch_library_${name}}")
  target_link_libraries(Torch::Torch INTERFACE Torch::${name})
  if(EAGERCACHE_PORTABLE)
    set_property(TARGET eagercache_older_archive APPEND PROPERTY INTERFACE_LINK_LIBRARIES Torch::${name})
  endif()
endforeach()
# The libraries that libtorch_cpu itself needs (a CUDA build's libcudart among them) resolve through its
# own RPATH when a process starts; the static linker need not see them.
target_link_options(Torch::Torch INTERFACE -Wl,--allow-shlib-undefined)

# What a module that takes and gives Python tensors links besides.
add_library(Torch::Python INTERFACE IMPORTED)
find_library(torch_library_torch_python torch_python PATHS "${torch_lib_dir}" NO_DEFAULT_PATH REQUIRED)
target_link_libraries(Torch::Python INTERFACE Torch::Torch "${torch_library_torch_python}")
