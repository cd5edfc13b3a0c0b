// One variant of linear4bit.cu.
namespace CASE {
#include "../linear4bit.cu"

static void run(i64 count, i64 block, i64 nested_block) {
    std::string what = std::string(__PRETTY_FUNCTION__) + " " + std::to_string(count) + " in blocks of " + std::to_string(block);
    i64 scales = (count + block - 1) / block, outer = NESTED ? (scales + nested_block - 1) / nested_block : scales;
    Memory<float> code = Memory<float>::normal(16), scale = Memory<float>::normal(outer), second = Memory<float>::normal(256);
    Memory<u8> packed((count + 1) / 2), index(scales);
    for (i64 i = 0; i < (count + 1) / 2; i++) packed[i] = (u8)rng.below(256);
    for (i64 i = 0; i < scales; i++) index[i] = (u8)rng.below(256);
    float offset = 0.25f;
    // The kernel's output begins at a multiple of 16 bytes, and memory ends with a page here: what is added is not written.
    i64 whole = (count + RUN - 1) / RUN * RUN;
    Memory<T> out(whole);
    std::vector<double> want(count);
    for (i64 i = 0; i < count; i++) {
        i64 b = i / block;
        double s = NESTED ? (double)second[index[b]] * scale[b / nested_block] + offset : scale[b];
        want[i] = code[i % 2 ? packed[i / 2] % 16 : packed[i / 2] / 16] * s;
    }
    in_orders([&](int order) {
        for (i64 grid : {i64(1), (count + 2047) / 2048}) {
            emulator::launch(order, dim3((u32)grid), dim3(256), 0,
                             [&] { dequantise4bit(out, packed, code, scale, index, second, count, block, nested_block, offset); });
            auto got = out.numbers();
            for (i64 i = count; i < whole; i++)
                if (!std::isnan(got[i])) failures++, printf("%s: wrote past the end\n", what.c_str());
            compare(what, got, want, unit_of<T>() + 4 * unit_of<float>());
        }
    });
}

static Test test([] {
    run(1, 4, 1);
    run(8, 8, 2);
    run(37, 5, 3);
    run(64 * 9, 64, 4);
    run(5003, 16, 7);
    run(2048, 4096, 256);
});
}  // namespace CASE
#undef CASE
#undef T
#undef NESTED
#undef RUN
