# cython: language_level=3
"""The C handles behind pyverbs objects, for kvtransfer.pyverbs.

pyverbs keeps the ibv_* pointer as the first field after its own base class and exports no headers.
So the pointer is read from there, and believed only when the structure it points to says what the
Python object says: the memory is read through the kernel, which answers an error where a wrong
pointer would crash.
"""

import os

cdef extern from "<infiniband/verbs.h>" nogil:
    struct ibv_qp:
        unsigned int qp_num
        int qp_type


cdef size_t field_after(object instance, object base) except 0:
    """The pointer-sized value right behind the base class's part of an instance."""
    cdef Py_ssize_t offset = base.__basicsize__
    if not isinstance(instance, base) or type(instance).__basicsize__ < offset + <Py_ssize_t>sizeof(void*):
        raise TypeError(f"{instance!r} is no {base.__name__} with a handle")
    cdef size_t value = (<size_t*>(<char*><void*>instance + offset))[0]
    if value == 0:
        raise ValueError(f"{instance!r} is closed")
    return value


cdef bytes peek(size_t address, size_t num_bytes):
    cdef int memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, num_bytes, address)
    except OSError as error:
        raise ValueError(f"no memory at {address:#x}") from error
    finally:
        os.close(memory)


def queue_pair(object qp, object base, unsigned int number, int kind) -> int:
    """Address of the ibv_qp of a pyverbs QP whose number and type are these.

    ``base`` is pyverbs.base.PyverbsCM. Raises ValueError when the memory there is something else.
    """
    cdef size_t address = field_after(qp, base)
    cdef bytes copy = peek(address, sizeof(ibv_qp))
    if len(copy) < <Py_ssize_t>sizeof(ibv_qp):
        raise ValueError(f"no ibv_qp at {address:#x}")
    cdef ibv_qp* seen = <ibv_qp*><char*>copy
    if seen.qp_num != number or seen.qp_type != kind:
        raise ValueError(
            f"this pyverbs keeps its handles elsewhere: no queue pair {number} at {address:#x}"
        )
    return address

