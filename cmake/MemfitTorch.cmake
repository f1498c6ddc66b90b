# Finds LibTorch inside the Python environment (.venv by default) and gives memfit_use_torch(target scope).
if(NOT Torch_DIR)
  find_program(MEMFIT_PYTHON NAMES python3 python HINTS ${PROJECT_SOURCE_DIR}/.venv/bin NO_DEFAULT_PATH)
  find_program(MEMFIT_PYTHON NAMES python3)
  execute_process(COMMAND ${MEMFIT_PYTHON} -c "import torch; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE _torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _torch_result ERROR_QUIET)
  if(NOT _torch_result EQUAL 0)
    message(FATAL_ERROR "No torch in ${MEMFIT_PYTHON}. Run scripts/setup.sh, or pass -DTorch_DIR=..., or -DMEMFIT_TORCH=OFF.")
  endif()
  list(APPEND CMAKE_PREFIX_PATH ${_torch_prefix})
endif()
find_package(Torch REQUIRED)

# One precompiled header for every TORCH target: torch's headers cost about 15 s a file without it.
file(WRITE ${CMAKE_BINARY_DIR}/torch_pch.cpp "// anchor of the torch precompiled header\n")
add_library(memfit_torch_pch STATIC ${CMAKE_BINARY_DIR}/torch_pch.cpp)
target_link_libraries(memfit_torch_pch PUBLIC ${TORCH_LIBRARIES})
target_compile_definitions(memfit_torch_pch PRIVATE FMT_HEADER_ONLY)
target_precompile_headers(memfit_torch_pch PRIVATE <torch/torch.h> <vector> <string> <memory>)
target_compile_options(memfit_torch_pch PRIVATE -fpch-preprocess)

function(memfit_use_torch TARGET SCOPE)
  target_link_libraries(${TARGET} ${SCOPE} ${TORCH_LIBRARIES})
  # The wheel ships fmt headers of a version of its own, in front of Debian's: take them without a library.
  target_compile_definitions(${TARGET} PRIVATE FMT_HEADER_ONLY)
  get_target_property(type ${TARGET} TYPE)
  if(type STREQUAL EXECUTABLE)
    # -fPIE would not match the precompiled header, and every executable would read torch's headers again.
    set_target_properties(${TARGET} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${TARGET} PRIVATE -fPIC)
  endif()
  if(NOT MEMFIT_SANITIZE)
    target_precompile_headers(${TARGET} REUSE_FROM memfit_torch_pch)
    target_compile_options(${TARGET} PRIVATE -fpch-preprocess)  # ccache needs it to see what the header holds
  endif()
endfunction()
