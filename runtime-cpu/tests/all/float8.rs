//! The 8-bit floats: casts against PyTorch's and against the nearest of all values, moves, and what is refused.

use std::hash::Hasher;

use numcore::{
    DType, Fnv1a, Shape, Tensor, TensorMut,
    ops::{Apply, IndexOps, MatmulOps, Op, PointwiseOps, Reduce, ReduceOps, SortOps, ViewOps, cat},
    pointwise::{Number, Program},
    rng::Philox,
};
use runtime_cpu::Cpu;

type T = Tensor<Cpu>;

const FORMATS: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

fn hash(bytes: &[u8]) -> u64 {
    let mut hash = Fnv1a::default();
    hash.write(bytes);
    hash.finish()
}

fn codes(dtype: DType) -> T {
    let all: Vec<u8> = (0..=255).collect();
    T::from_bytes(&Cpu::new(), Shape::new(&[256]).unwrap(), dtype, &all).unwrap()
}

fn of_bits(dtype: DType, bits: impl Iterator<Item = u32>) -> T {
    let bytes: Vec<u8> = bits.flat_map(|b| b.to_le_bytes().into_iter().take(dtype.size())).collect();
    T::from_bytes(&Cpu::new(), Shape::new(&[bytes.len() / dtype.size()]).unwrap(), dtype, &bytes).unwrap()
}

/// The bytes of a tensor; PyTorch has one NaN in bf16, and this runtime keeps a NaN's bits.
fn bytes_of(x: &T) -> Vec<u8> {
    let quiet = |bits: u16| if bits & 0x7fff > 0x7f80 { 0x7fc0 } else { bits };
    let mut bytes = x.to_bytes().unwrap();
    for pair in bytes.chunks_exact_mut(2).filter(|_| x.dtype() == DType::BF16) {
        pair.copy_from_slice(&quiet(u16::from_le_bytes([pair[0], pair[1]])).to_le_bytes());
    }
    bytes
}

/// Hashes of PyTorch 2.15's results: bits of all codes as f32, f16, bf16 and f64; codes of all f16 and bf16, and of the
/// f32 whose lower 14 bits are 0, or 1.
#[test]
fn casts_have_pytorchs_bits() {
    let expected = [
        [0x1852_4215_6ecb_8bc5, 0x9dc6_4417_2489_7d25, 0xa702_fd64_56a9_6ed5, 0x02be_000c_b312_6b25],
        [0x7b50_e0ae_84e3_fa05, 0x7412_4d94_8b58_5225, 0x6a0b_3aed_44b1_f6d5, 0xac1c_524d_94d3_b005],
    ];
    let rounded: [[u64; 4]; 2] = [
        [0x2d72_4a81_49ff_1225, 0xf9de_a88c_05be_79a5, 0x6008_0c10_054f_d725, 0xa7fe_1a71_586a_d6a5],
        [0x087c_cdde_80d9_3f25, 0xe1c1_40aa_89ae_5765, 0xbe58_5bc7_abf7_3025, 0xdfd8_bc49_59db_af25],
    ];
    for (i, dtype) in FORMATS.into_iter().enumerate() {
        let wide = [DType::F32, DType::F16, DType::BF16, DType::F64];
        let got = wide.map(|to| hash(&bytes_of(&codes(dtype).to_dtype(to).unwrap())));
        assert_eq!(got, expected[i], "{dtype}");
        let all = |from| of_bits(from, 0..1 << 16);
        let single = |low| of_bits(DType::F32, (0..1u32 << 18).map(move |high| high << 14 | low));
        let patterns = [all(DType::F16), all(DType::BF16), single(0), single(1)];
        let got = patterns.map(|x| hash(&x.to_dtype(dtype).unwrap().to_bytes().unwrap()));
        assert_eq!(got, rounded[i], "{dtype}");
    }
}

/// The value of a code by the definition of the formats; `None` for NaN.
fn value(dtype: DType, code: u8) -> Option<f64> {
    let (fraction_bits, bias) = if dtype == DType::F8E4M3 { (3, 7) } else { (2, 15) };
    let (e, f) = ((code & 0x7f) >> fraction_bits, f64::from(code & ((1 << fraction_bits) - 1)));
    let special = if dtype == DType::F8E4M3 { code & 0x7f == 0x7f } else { e == 31 };
    let unit = 2f64.powi(-fraction_bits);
    let magnitude = match e {
        _ if special => return (dtype == DType::F8E5M2 && f == 0.0).then_some(f64::INFINITY),
        0 => f * unit * 2f64.powi(1 - bias),
        _ => (1.0 + f * unit) * 2f64.powi(i32::from(e) - bias),
    };
    Some(if code & 0x80 == 0 { magnitude } else { -magnitude })
}

#[test]
fn casts_give_the_nearest_value_and_the_even_one_of_two() {
    let mut rng = Philox::new(5, 0);
    for dtype in FORMATS {
        let positive: Vec<f64> = (0..0x7f).map_while(|c| value(dtype, c)).filter(|v| v.is_finite()).collect();
        assert_eq!(positive.last(), Some(&dtype.largest()));
        let mut xs: Vec<f32> = positive.windows(2).map(|w| ((w[0] + w[1]) / 2.0) as f32).collect();
        let near: Vec<f32> = xs.iter().flat_map(|x| [x.next_up(), x.next_down()]).collect();
        xs.extend(near);
        xs.extend((0..20_000).map(|_| (rng.normal() * 2f64.powi((rng.normal() * 9.0) as i32)) as f32));
        xs.retain(|x| f64::from(x.abs()) <= dtype.largest());
        let got = T::from_vec(&Cpu::new(), xs.clone()).unwrap().to_dtype(dtype).unwrap().to_bytes().unwrap();
        for (x, code) in xs.iter().zip(got) {
            let at = |c: &f64| (f64::from(x.abs()) - c).abs();
            let nearest = positive.iter().map(at).fold(f64::INFINITY, f64::min);
            let ties: Vec<usize> = (0..positive.len()).filter(|&c| at(&positive[c]) == nearest).collect();
            let due = ties.iter().find(|&&c| ties.len() == 1 || c % 2 == 0).unwrap();
            assert_eq!((code & 0x7f, code >> 7), (*due as u8, u8::from(x.is_sign_negative())), "{x:e} as {dtype}");
            let host = Number::Float(f64::from(*x)).cast(dtype).to_f64();
            assert_eq!(host.abs(), positive[*due], "{x:e} on the host");
        }
    }
}

/// `clamp` first saturates both formats; integers and `f64` go through `f32`, as in PyTorch.
#[test]
fn clamped_casts_saturate() {
    let x = T::from_vec(&Cpu::new(), vec![1e6f64, -1e6, f64::INFINITY, f64::NAN, 3.0]).unwrap();
    for (dtype, largest) in FORMATS.into_iter().zip([0x7e, 0x7b]) {
        let clamped = x.clamp(-dtype.largest(), dtype.largest()).unwrap().to_dtype(dtype).unwrap();
        let got = clamped.to_bytes().unwrap();
        assert_eq!(got[..4], [largest, largest | 0x80, largest, 0x7f], "{dtype}");
        assert_eq!(clamped.to_f64s().unwrap()[4], 3.0);
        let whole = T::from_vec(&Cpu::new(), vec![300i64, -5, 0]).unwrap().to_dtype(dtype).unwrap();
        let near = if dtype == DType::F8E4M3 { 288.0 } else { 320.0 };
        assert_eq!(whole.to_f64s().unwrap(), [near, -5.0, 0.0]);
        assert_eq!(whole.to_dtype(DType::I32).unwrap().to_vec::<i32>().unwrap(), [near as i32, -5, 0]);
    }
}

#[test]
fn codes_are_moved_unchanged() {
    for dtype in FORMATS {
        let x = codes(dtype);
        let turned: Vec<u8> = (0..16).flat_map(|i| (0..16).map(move |j| j * 16 + i)).collect();
        let seen = x.reshape([16, 16]).unwrap().t().unwrap();
        assert_eq!(seen.copy().unwrap().to_bytes().unwrap(), turned, "{dtype}");
        let joined = cat(&[&x.narrow(0, 0, 3).unwrap(), &x.narrow(0, 250, 6).unwrap()], 0).unwrap();
        assert_eq!(joined.to_bytes().unwrap(), [0, 1, 2, 250, 251, 252, 253, 254, 255], "{dtype}");
        let index = T::from_vec(&Cpu::new(), vec![255i64, 127, 0]).unwrap();
        assert_eq!(x.index_select(0, &index).unwrap().to_bytes().unwrap(), [255, 127, 0], "{dtype}");
        assert_eq!(x.bit_cast(DType::U8).unwrap().to_bytes().unwrap(), x.to_bytes().unwrap());
        assert_eq!(T::full(&Cpu::new(), [2], dtype, -2.0).unwrap().to_f64s().unwrap(), [-2.0; 2]);
    }
}

#[test]
fn arithmetic_is_refused_by_name() {
    let x = codes(DType::F8E4M3).reshape([16, 16]).unwrap();
    let added = Program::new("plus_one", |[x], []| [x + 1.0]);
    let cast = Program::new("cast_and_summed", |[x], []| [x.cast(DType::F8E4M3)]);
    let cast = Reduce::sum_of(cast, Default::default(), Shape::new(&[1, 16]).unwrap());
    let wide = x.to_dtype(DType::F32).unwrap();
    let mut memory = TensorMut::zeros(&Cpu::new(), *x.shape(), x.dtype()).unwrap();
    let errors = [
        ("add", x.add(&x).map(drop)),
        ("eq", x.eq(&x).map(drop)),
        ("matmul", x.matmul(&x).map(drop)),
        ("sum", x.sum(&[0]).map(drop)),
        ("cast_and_summed", T::apply1(cast, &[&wide]).map(drop)),
        ("amax", x.amax(&[0]).map(drop)),
        ("sort", x.sort(0, false).map(drop)),
        ("where", x.where_cond(&T::ones(&Cpu::new(), [16, 16], DType::Bool).unwrap(), &x).map(drop)),
        ("plus_one", x.apply_program(&added, &[], &[]).map(drop)),
        ("copy", memory.accumulate(&Op::identity(), &[&x])),
    ];
    for (op, result) in errors {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("f8e4m3 is stored and moved") && message.contains("`to_dtype`"), "{op}: {message}");
    }
    // A program may cast, and then compute.
    let scaled = Program::new("dequantized", |[x, scale], []| [x.cast(DType::F32) * scale]);
    let scale = T::full(&Cpu::new(), [1], DType::F32, 0.5).unwrap();
    let got = x.apply_program(&scaled, &[&scale], &[]).unwrap();
    assert_eq!(got.to_f64s().unwrap()[0x38], 0.5);
}
