// What the sources for a CPU include of the system (on_cpu.py compiles it once).
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a fault
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>
