// The report of a program that runs with the preload library but without `memfit run`: written by the process itself at
// its normal exit. A library of its own (libmemfit_exit_report.so), loaded only where MEMFIT_REPORT asks for it, so
// that the preload library stays without dependencies. Threads: none, called once at attach and once at exit. Cost: one
// file.
#pragma once

#include <cstddef>

#include "memfit/trace/run_status.h"

extern "C" {

/// Whether the report can be written to `path` when the process exits. Returns 0, or 2 with the reason in `message`.
int memfit_check_exit_report(const char* path, bool force, char* message, std::size_t capacity);

/// Write the report and, unless `quiet`, one line on stderr. Complains there when it cannot; never throws.
void memfit_write_exit_report(const memfit::trace::RunStatus* status, const char* path, bool force, bool quiet);
}
