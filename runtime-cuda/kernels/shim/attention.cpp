// attention.cu and attention_grad.cu against the formulas.
#include "check.h"

#define CASE f32_32
#define T float
#define HEAD_DIM 32
#include "attention_case.h"

#define CASE f32_80
#define T float
#define HEAD_DIM 80
#include "attention_case.h"

#define CASE f16_32
#define T f16
#define HEAD_DIM 32
#include "attention_case.h"

#define CASE f16_64
#define T f16
#define HEAD_DIM 64
#include "attention_case.h"

#define CASE bf16_96
#define T bf16
#define HEAD_DIM 96
#include "attention_case.h"

#define CASE bf16_128
#define T bf16
#define HEAD_DIM 128
#include "attention_case.h"

int main() { return run_all("attention"); }
