# Links Python files into a build tree's package: cmake -DSOURCE=FOLDER -DTARGET=FOLDER -DLIST=FILE -P LinkPackage.cmake
# LIST names them below SOURCE, a line each. A link that is right stays as it is: to make it anew takes it away for a
# moment, in which a program that starts finds a file of the package missing.
cmake_minimum_required(VERSION 3.24)
file(STRINGS "${LIST}" names)
foreach(name IN LISTS names)
  set(link "${TARGET}/${name}")
  if(IS_SYMLINK "${link}")
    file(READ_SYMLINK "${link}" old)
    if(old STREQUAL "${SOURCE}/${name}")
      continue()
    endif()
  endif()
  get_filename_component(folder "${link}" DIRECTORY)
  file(MAKE_DIRECTORY "${folder}")
  file(CREATE_LINK "${SOURCE}/${name}" "${link}" SYMBOLIC)
endforeach()
