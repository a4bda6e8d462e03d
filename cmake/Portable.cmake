# EAGERCACHE_PORTABLE: libraries that need nothing newer of a system than manylinux_2_28 lets them (scripts/release).
# No older system has to be there: they are linked against libraries made of this one's, which have what an older
# one has, too (older/libraries.py), with what libc lacks there (older/system.cc) and, for libstdc++, its archive. All
# of it is looked for before torch's libraries, which export parts of a std::filesystem of their own.
set(older_libraries "${CMAKE_BINARY_DIR}/older")
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/older/libraries.py" --cxx "${CMAKE_CXX_COMPILER}"
          --output "${older_libraries}"
  COMMAND_ERROR_IS_FATAL ANY)

function(eagercache_archive variable name)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=${name}"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT EXISTS "${found}")
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no ${name}.")
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()
eagercache_archive(older_stdcxx libstdc++.a)
eagercache_archive(older_nonshared libc_nonshared.a)

add_library(eagercache_older_system STATIC "${PROJECT_SOURCE_DIR}/cmake/older/system.cc")
target_compile_features(eagercache_older_system PRIVATE cxx_std_20)
target_compile_options(eagercache_older_system PRIVATE -fvisibility=hidden)

# Imported, so that their order holds on every command line: ours, this system's names, the archive, torch.
add_library(eagercache_older_archive STATIC IMPORTED)
set_target_properties(eagercache_older_archive PROPERTIES
  IMPORTED_LOCATION "${older_stdcxx}" INTERFACE_LINK_LIBRARIES eagercache_older_system)
add_library(eagercache_older_names SHARED IMPORTED)
set_target_properties(eagercache_older_names PROPERTIES
  IMPORTED_LOCATION "${older_libraries}/libstdc++.so" INTERFACE_LINK_LIBRARIES eagercache_older_archive)

add_library(eagercache_older INTERFACE)
target_link_options(eagercache_older INTERFACE -nodefaultlibs "-L${older_libraries}"
  "-Wl,--exclude-libs,libstdc++.a:libc_nonshared.a:libeagercache_older_system.a")
target_link_libraries(eagercache_older INTERFACE eagercache_older_names)
target_link_libraries(eagercache_older_system INTERFACE
  "${older_libraries}/libm.so" "${older_libraries}/libgcc_s.so" "${older_libraries}/libc.so"
  "${older_libraries}/libld-linux.so" "${older_nonshared}" -lgcc)
