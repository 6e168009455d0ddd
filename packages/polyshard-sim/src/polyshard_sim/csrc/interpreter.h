// Lets go of Python's interpreter lock where the host waits, if this thread holds it.
#pragma once
#include <Python.h>

namespace sim {

struct WithoutInterpreterLock {
  PyThreadState* state = nullptr;
  WithoutInterpreterLock() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutInterpreterLock() {
    if (state) PyEval_RestoreThread(state);
  }
};

}  // namespace sim
