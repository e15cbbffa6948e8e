// The instructions that our CUDA C++ kernels are made of; they are compiled behind this (`nvrtc.source`). With BF16
// defined, or for float16.

typedef unsigned int u32;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Bytes that are not held become 0: NaN in an unused slot must not reach a product with weight 0.
__device__ __forceinline__ void copy16(u32 target, const char* source, bool held) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(held ? 16 : 0));
}

// For what is read once and by nobody else: it need not push other things out of the L2 cache.
__device__ __forceinline__ unsigned long long read_once() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy16(u32 target, const char* source, unsigned long long policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "l"(policy));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

template <int PENDING>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

__device__ __forceinline__ void wait_for_kernel_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void multiply_add(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two products, rounded once.
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 product;
#if BF16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
#else
    // What is not scaled by the norm's factor yet may be past the largest number: that one is taken.
    asm("{.reg .b32 t;\n mul.rn.f16x2 t, %1, %2;\n min.f16x2 t, t, %3;\n max.f16x2 %0, t, %4;}"
        : "=r"(product)
        : "r"(a), "r"(b), "r"(0x7bff7bffu), "r"(0xfbfffbffu));
#endif
    return product;
}

__device__ __forceinline__ float2 unpack(u32 packed) {
    float2 both;
#if BF16
    both.x = __uint_as_float(packed << 16);
    both.y = __uint_as_float(packed & 0xffff0000u);
#else
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
        : "=f"(both.x), "=f"(both.y)
        : "r"(packed));
#endif
    return both;
}

__device__ __forceinline__ unsigned short rounded(float x) {
    unsigned short bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
#endif
    return bits;
}

__device__ __forceinline__ float element(const char* from, long long index) {
    return unpack(reinterpret_cast<const unsigned short*>(from)[index]).x;
}

__device__ __forceinline__ void store(char* to, long long index, float value) {
    reinterpret_cast<unsigned short*>(to)[index] = rounded(value);
}
