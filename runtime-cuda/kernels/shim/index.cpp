// gather.cu, scatter_add.cu and radix.cu against plain loops.
#include "check.h"

#define CASE f32_u32
#define T float
#define K u32
#include "index_case.h"

#define CASE bf16_u64
#define T bf16
#define K u64
#include "index_case.h"

#define CASE i64_u32
#define T i64
#define K u32
#include "index_case.h"

#define CASE b8_u32
#define T b8
#define K u32
#include "index_case.h"

#define CASE u8_u64
#define T u8
#define K u64
#include "index_case.h"

int main() { return run_all("index"); }
