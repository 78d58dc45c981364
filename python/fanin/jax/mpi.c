/* The MPI that XLA's CPU client loads through MPItrampoline, as far as XLA calls it.

   MPItrampoline looks up every name of its ABI when it loads a library. If one is missing, it ends
   the process. XLA calls 15 functions. `mpi.py` writes the other names to FANIN_NAMES: their
   functions end the process with a text. Three of the 15 are done here. The other twelve call
   Python, which sets their pointers in MPI_Init_thread (`mpi_calls.py`).

   Python is found among the symbols of the process, so this file needs neither Python's headers nor
   an MPI's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef uintptr_t handle;

/* A library may be newer than MPItrampoline by its minor version. This one has the names of the
   jaxlib that it was made for, whatever minor version that asks for. */
const int mpiabi_version_major = 2;
const int mpiabi_version_minor = 1000;
const int mpiabi_version_patch = 0;
const int mpiwrapper_version_major = 2;
const int mpiwrapper_version_minor = 1000;
const int mpiwrapper_version_patch = 0;

void mpiwrapper_export_fortran_constants_(void) {}

static void absent(const char *name) {
  fprintf(stderr,
          "fanin: %s was called. fanin's MPI has the calls of XLA's collectives alone: other "
          "programs need an MPI of their own\n",
          name);
  abort();
}

static void early(const char *name) {
  fprintf(stderr,
          "fanin: %s was called before MPI_Init_thread, which XLA calls when it makes its CPU "
          "client: run jax.devices() first\n",
          name);
  abort();
}

#define CONSTANT(name, value) const handle name = value;
#define FUNCTION(name) \
  void name(void) { absent(#name); }
#include FANIN_NAMES

#define CALL(name, parameters, arguments)       \
  int(*fanin_##name) parameters;                \
  int MPIABI_##name parameters {                \
    if (!fanin_##name) early("MPI_" #name);     \
    return fanin_##name arguments;              \
  }

CALL(Allgather,
     (const void *from, int count, handle datatype, void *into, int counts, handle datatypes,
      handle comm),
     (from, count, datatype, into, counts, datatypes, comm))
CALL(Allreduce,
     (const void *from, void *into, int count, handle datatype, handle op, handle comm),
     (from, into, count, datatype, op, comm))
CALL(Comm_rank, (handle comm, int *rank), (comm, rank))
CALL(Comm_size, (handle comm, int *size), (comm, size))
CALL(Comm_split, (handle comm, int color, int key, handle *made), (comm, color, key, made))
CALL(Error_string, (int error, char *text, int *length), (error, text, length))
CALL(Finalize, (void), ())
CALL(Irecv,
     (void *into, int count, handle datatype, int source, int tag, handle comm, handle *request),
     (into, count, datatype, source, tag, comm, request))
CALL(Isend,
     (const void *from, int count, handle datatype, int to, int tag, handle comm, handle *request),
     (from, count, datatype, to, tag, comm, request))
CALL(Reduce_scatter,
     (const void *from, void *into, const int *counts, handle datatype, handle op, handle comm),
     (from, into, counts, datatype, op, comm))
CALL(Sendrecv,
     (const void *from, int count, handle datatype, int to, int tag, void *into, int counts,
      handle datatypes, int source, int tags, handle comm, void *status),
     (from, count, datatype, to, tag, into, counts, datatypes, source, tags, comm, status))
CALL(Wait, (handle *request, void *status), (request, status))

/* XLA makes communicators on any of its threads, and only if the answer is yes. Groups of fanin may
   be used on every thread. */
int MPIABI_Is_thread_main(int *flag) {
  *flag = 1;
  return 0;
}

/* Finalize closes all groups. XLA frees communicators later, when Python may be gone. */
int MPIABI_Comm_free(handle *comm) {
  (void)comm;
  return 0;
}

int MPIABI_Init_thread(int *argc, char ***argv, int required, int *provided) {
  (void)argc, (void)argv;
  int (*lock)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  void (*unlock)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
  void *(*import)(const char *) = dlsym(RTLD_DEFAULT, "PyImport_ImportModule");
  void *(*call)(void *, const char *, const char *, ...) =
      dlsym(RTLD_DEFAULT, "PyObject_CallMethod");
  void (*print)(void) = dlsym(RTLD_DEFAULT, "PyErr_Print");
  if (!lock || !unlock || !import || !call || !print) absent("MPI_Init_thread outside of Python");
  int state = lock();
  void *module = import("fanin.jax.mpi_calls");
  if (!module || !call(module, "begin", NULL)) {
    print();
    /* XLA does not look at what this function returns. */
    _exit(1);
  }
  unlock(state);
  *provided = required;
  return 0;
}
