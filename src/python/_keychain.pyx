# cython: language_level=3, boundscheck=False, wraparound=False
"""The loop of keys.chain_keys, compiled: SHA-256 chained over blocks of token ids.

Calls libcrypto's SHA256_Init/Update/Final, loaded at run time, so that the wheel links no OpenSSL;
`available()` is False where there is none, and keys.py uses hashlib then.
"""

from libc.string cimport memcpy

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char* name, int flags)
    void* dlsym(void* handle, const char* name)
    int RTLD_NOW

ctypedef int (*init_fn)(void*) noexcept nogil
ctypedef int (*update_fn)(void*, const void*, size_t) noexcept nogil
ctypedef int (*final_fn)(unsigned char*, void*) noexcept nogil

cdef init_fn sha256_init = NULL
cdef update_fn sha256_update = NULL
cdef final_fn sha256_final = NULL


cdef void load() noexcept:
    global sha256_init, sha256_update, sha256_final
    cdef void* handle = dlopen(b"libcrypto.so.3", RTLD_NOW)
    if handle == NULL:
        handle = dlopen(b"libcrypto.so.1.1", RTLD_NOW)
    if handle == NULL:
        return
    sha256_init = <init_fn>dlsym(handle, b"SHA256_Init")
    sha256_update = <update_fn>dlsym(handle, b"SHA256_Update")
    sha256_final = <final_fn>dlsym(handle, b"SHA256_Final")


load()


def available() -> bool:
    return sha256_init != NULL and sha256_update != NULL and sha256_final != NULL


def chain(bytes parent, const unsigned char[::1] data, size_t block_bytes, unsigned char[::1] out) -> None:
    """out[32 * i : 32 * (i + 1)] = SHA-256(previous key || data[block_bytes * i : ...]).

    REQUIRES: available(); len(parent) == 32; len(data) >= len(out) / 32 * block_bytes. No GIL.
    """
    cdef size_t blocks = out.shape[0] // 32
    cdef size_t i
    cdef unsigned char key[32]
    cdef unsigned long long context[32]  # SHA256_CTX has 112 bytes
    if len(parent) != 32 or <size_t>data.shape[0] < blocks * block_bytes:
        raise ValueError("chain: sizes don't fit")
    memcpy(key, <const unsigned char*>parent, 32)
    if blocks == 0:
        return
    with nogil:
        for i in range(blocks):
            sha256_init(context)
            sha256_update(context, key, 32)
            sha256_update(context, &data[i * block_bytes], block_bytes)
            sha256_final(key, context)
            memcpy(&out[32 * i], key, 32)
