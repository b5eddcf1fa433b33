#include "front_method.hpp"

#include <nanobind/stl/string.h>
#include <structmember.h>

#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "front_quick.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

namespace {

// The Python type of a method. nanobind's own functions can't stand in a class of torch's, with a method to fall back
// on.
struct FrontMethod {
  PyObject_HEAD vectorcallfunc vectorcall;
  const Method* method;
  PyObject* fallback;
  PyObject* weak_references;
};

PyObject* call_method(PyObject* callable, PyObject* const* args, std::size_t flagged, PyObject* keywords) {
  const auto* self = reinterpret_cast<const FrontMethod*>(callable);
  const Py_ssize_t num = PyVectorcall_NARGS(flagged);
  if (num >= 1) {
    try {
      return carry_out_plain(*self->method, args[0], args + 1, num - 1, keywords).release().ptr();
    } catch (const NotPlain&) {
    } catch (const UnknownTensor&) {
    } catch (const Problem&) {
    } catch (nb::python_error& error) {
      error.restore();
      return nullptr;
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(self->fallback, args, flagged, keywords);
}

PyObject* bind_to(PyObject* method, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(method);
  return PyMethod_New(method, instance);
}

bool is_own(PyObject* name) {
  for (const char* own : {"__get__", "__call__", "__reduce__", "__reduce_ex__"}) {
    if (PyUnicode_CompareWithASCIIString(name, own) == 0) return true;
  }
  return false;
}

// Name, docstring, signature and marks are those of the Python method.
PyObject* get_attribute(PyObject* method, PyObject* name) {
  if (is_own(name)) return PyObject_GenericGetAttr(method, name);
  PyObject* found = PyObject_GetAttr(reinterpret_cast<FrontMethod*>(method)->fallback, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GenericGetAttr(method, name);
}

// Pickled by its name, as functions are.
PyObject* reduce(PyObject* method, PyObject*) {
  return PyObject_GetAttrString(reinterpret_cast<FrontMethod*>(method)->fallback, "__qualname__");
}

int traverse(PyObject* method, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(method));
  Py_VISIT(reinterpret_cast<FrontMethod*>(method)->fallback);
  return 0;
}

void deallocate(PyObject* method) {
  PyTypeObject* type = Py_TYPE(method);
  PyObject_GC_UnTrack(method);
  if (reinterpret_cast<FrontMethod*>(method)->weak_references != nullptr) PyObject_ClearWeakRefs(method);
  Py_CLEAR(reinterpret_cast<FrontMethod*>(method)->fallback);
  type->tp_free(method);
  Py_DECREF(type);
}

PyObject* method_type() {
  static PyMethodDef methods[] = {
      {"__reduce__", &reduce, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, offsetof(FrontMethod, weak_references), READONLY, nullptr},
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(FrontMethod, vectorcall), READONLY, nullptr},
      {"fallback", T_OBJECT_EX, offsetof(FrontMethod, fallback), READONLY, "Who carries out calls that are not plain."},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&bind_to)},
      {Py_tp_getattro, reinterpret_cast<void*>(&get_attribute)},
      {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
      {Py_tp_methods, methods},
      {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
      {Py_tp_members, members},
      {0, nullptr},
  };
  static PyType_Spec spec{"phalanx._core_ext.FrontMethod", sizeof(FrontMethod), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                              Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                          slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  return type;
}

nb::object make_method(const std::string& name, nb::object fallback) {
  static auto* const type = reinterpret_cast<PyTypeObject*>(method_type());
  const Method* found = find_method(name);
  if (found == nullptr) throw std::invalid_argument("no such method of the front: " + name);
  auto* made = reinterpret_cast<FrontMethod*>(type->tp_alloc(type, 0));
  if (made == nullptr) throw nb::python_error();
  made->vectorcall = &call_method;
  made->method = found;
  made->fallback = fallback.release().ptr();
  return nb::steal(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void bind_front_method(nb::module_& module) {
  nb::class_<Front>(module, "Front", "A group's side of the front.")
      .def(
          "__init__",
          [](Front* self, nb::object group, double timeout) {
            new (self) Front{group, &nb::cast<GroupEnd&>(group), timeout, 0, false};
          },
          "group"_a, "timeout"_a)
      .def_rw("timeout", &Front::timeout, "Of calls that have none of their own, in seconds.")
      .def_ro("copies", &Front::copies, "How many calls in flight write to copies of tensors.")
      // In one step with regard to other threads, which holding the GIL makes it.
      .def(
          "count_copies", [](Front& self, int change) { self.copies += change; }, "change"_a,
          "A call that writes to copies has begun (1), or its copies are back (-1).")
      .def_rw("coalescing", &Front::coalescing, "Whether a coalescing manager collects the works of calls.")
      .def("close", [](Front& self) {
        self.group = nullptr;
        self.object.reset();
      });
  module.def("front_method", &make_method, "name"_a, "fallback"_a,
             nb::sig("def front_method(name: str, fallback: object) -> typing.Any"),
             "A method of a group that carries out plain calls itself, and leaves others to `fallback`.");
  module.def(
      "set_hooks",
      [](nb::object num_modes, nb::object profiler, nb::object done, nb::object finished, nb::object started,
         nb::object messaged, nb::object explain) {
        hooks() = {std::move(num_modes), std::move(profiler), std::move(done),   std::move(finished),
                   std::move(started),   std::move(messaged), std::move(explain)};
      },
      nb::kw_only(), "num_modes"_a, "profiler"_a, "done"_a, "finished"_a, "started"_a, "messaged"_a, "explain"_a,
      "Python's side of the front. To be called once, before the first call.");
}

}  // namespace phalanx
