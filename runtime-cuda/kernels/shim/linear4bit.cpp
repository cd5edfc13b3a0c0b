// linear4bit.cu against the formula.
#include "check.h"

#define CASE f32_plain
#define T float
#define NESTED 0
#include "linear4bit_case.h"

#define CASE f32_nested
#define T float
#define NESTED 1
#include "linear4bit_case.h"

#define CASE f16_plain
#define T f16
#define NESTED 0
#include "linear4bit_case.h"

#define CASE bf16_nested
#define T bf16
#define NESTED 1
#include "linear4bit_case.h"

#define CASE f64_nested
#define T double
#define NESTED 1
#include "linear4bit_case.h"

int main() { return run_all("linear4bit"); }
