// What the sources for a CPU include of the system (on_cpu.py compiles it once).
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp takes another stack for a fault
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

// In place of std::vector and std::map, whose code g++ makes anew for every program: two thirds of its time.
template <class T> struct List {  // of what may be moved as bytes
  T* items = nullptr;
  int count = 0, room = 0;
  List() = default;
  List(std::initializer_list<T> given) { for (const T& item : given) push_back(item); }
  void push_back(const T& item) {
    if (count == room) items = (T*)realloc((void*)items, (room = 2 * room + 8) * sizeof(T));
    items[count++] = item;
  }
  void clear() { count = 0; }
  int size() const { return count; }
  T* begin() const { return items; }
  T* end() const { return items + count; }
};
template <class Key, class T> struct Map {  // of few keys; what it holds stays where it is
  struct { Key key; T value; } items[64];
  int count = 0;
  T& operator[](Key key) {
    for (int i = 0; i < count; ++i)
      if (items[i].key == key) return items[i].value;
    if (count == 64) abort();
    items[count].key = key;
    return items[count++].value = {};
  }
  void clear() { count = 0; }
};
