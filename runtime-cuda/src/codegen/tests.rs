//! Tests that compile every op, cast, layout class and kind of reduction to machine code, for every architecture of
//! interest, without a GPU.

use std::sync::{Arc, LazyLock};

use numcore::{
    DType, Layout, ReduceKind, Shape,
    pointwise::{Binary, Expr, OpClass, Program, Unary},
};

use super::{
    KernelSource,
    scores::{ScoreSpec, TypedProgram},
};
use crate::{
    driver::{Architecture, Compiler},
    handwritten::HandwrittenKernel,
    operand::Operand,
    pointwise::{InputSource as In, Target, source_of},
    reduce::sources_of,
};

/// Compute capabilities of Ampere, Hopper and Blackwell.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

static COMPILERS: LazyLock<Vec<Compiler>> = LazyLock::new(|| {
    let compiler = |a| Compiler::new(Architecture(a), None, None);
    ARCHITECTURES.into_iter().map(compiler).collect()
});

/// Compiles for one architecture, chosen by a hash of the source, or for every one with the feature `nvrtc-all`. Shows
/// the source if that fails. Support by an architecture does not depend on the values of a source's defines, so the
/// table's other rows cover the others.
fn compile(source: &KernelSource) {
    let sum = source.text.bytes().fold(0usize, |sum, b| sum.wrapping_mul(31).wrapping_add(usize::from(b)));
    let one = sum % COMPILERS.len();
    compile_by(if cfg!(feature = "nvrtc-all") { &COMPILERS } else { &COMPILERS[one..=one] }, source);
}

fn compile_everywhere(source: &KernelSource) {
    compile_by(&COMPILERS, source);
}

fn compile_by(compilers: &[Compiler], source: &KernelSource) {
    for compiler in compilers {
        if let Err(e) = compiler.compile(source) {
            let lines = source.text.lines().enumerate().map(|(i, l)| format!("{:4} {l}\n", i + 1));
            panic!("{e}\n{}", lines.collect::<String>());
        }
    }
}

fn dense(dims: &[usize], dtype: DType) -> Operand {
    Operand { address: 4096, layout: Layout::contiguous(Shape::new(dims).unwrap()), dtype }
}

fn out(dims: &[usize], dtype: DType) -> Target {
    Target { to: dense(dims, dtype), add: false }
}

/// Compiles a program with outputs of types `results` over dense inputs of one type. Such programs hold every op of a
/// type at once.
fn check(program: &Program, dtype: DType, results: &[DType]) {
    let ins: Vec<In> = (0..program.inputs()).map(|_| In::View(dense(&[1000], dtype))).collect();
    let outs: Vec<Target> = results.iter().map(|d| out(&[1000], *d)).collect();
    compile(&source_of(program, &ins, &outs).unwrap());
}

fn unary<'b>(op: Unary, x: Expr<'b>) -> Expr<'b> {
    x.unary(op)
}

#[test]
fn every_op_of_one_operand() {
    for dtype in DType::ALL {
        let ops: Vec<Unary> = Unary::ALL.iter().copied().filter(|op| op.class().takes(dtype)).collect();
        if ops.is_empty() {
            continue;
        }
        let program = Program::build("unary", 1, 0, |_, x, _| ops.iter().map(|op| unary(*op, x[0])).collect());
        check(&program, dtype, &vec![dtype; ops.len()]);
    }
}

/// The types that kernels compute in.
fn computed() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|dtype| !dtype.is_storage())
}

#[test]
fn every_op_of_two_operands() {
    for dtype in computed() {
        let ops: Vec<Binary> = Binary::ALL.iter().copied().filter(|op| op.class().takes(dtype)).collect();
        let program = Program::build("binary", 2, 0, |_, x, _| ops.iter().map(|op| x[0].binary(*op, x[1])).collect());
        let results: Vec<DType> = ops.iter().map(|op| if op.is_comparison() { DType::Bool } else { dtype }).collect();
        check(&program, dtype, &results);
    }
}

#[test]
fn every_cast() {
    for dtype in computed() {
        let program = Program::build("casts", 1, 0, |_, x, _| computed().map(|d| x[0].cast(d)).collect());
        check(&program, dtype, &computed().collect::<Vec<_>>());
    }
}

#[test]
fn positions_random_bits_numbers_and_choices() {
    let program = Program::build("draw", 1, 2, |b, x, s| {
        let uniform = (b.random(0, 3) >> 8i64).cast(DType::F32) * 2f64.powi(-24);
        vec![
            uniform.lt(s[1]).select(x[0] * s[1], 0.0),
            b.index().cast(DType::F32),
            x[0] + f64::INFINITY,
            x[0] * f64::NAN,
        ]
    });
    for dims in [&[1000][..], &[7, 9]] {
        let x = In::View(dense(dims, DType::F32));
        compile(&source_of(&program, &[x], &[out(dims, DType::F32); 4]).unwrap());
    }
}

#[test]
fn a_float_is_never_computed_as_a_double() {
    let ops: Vec<Unary> =
        Unary::ALL.iter().copied().filter(|op| op.class() != OpClass::Bool && *op != Unary::Tan).collect();
    let program = Program::build("narrow", 1, 0, |_, x, _| ops.iter().map(|op| unary(*op, x[0])).collect());
    let source =
        source_of(&program, &[In::View(dense(&[64], DType::F32))], &vec![out(&[64], DType::F32); ops.len()]).unwrap();
    let ptx = COMPILERS[0].ptx(&source).unwrap();
    // The only doubles are in the library's own reduction of large angles.
    let doubles: Vec<&str> = ptx.lines().filter(|l| l.contains(".f64")).collect();
    let from_angles = |l: &&str| {
        l.contains("cvt.rn.f64.s64")
            || l.contains("mul.f64")
            || l.contains("mul.rn.f64")
            || l.contains("cvt.rn.f32.f64")
            || l.contains(".reg .f64")
    };
    assert!(doubles.iter().all(from_angles), "{doubles:#?}");
}

#[test]
fn every_class_of_layout() {
    let add = Program::new("add", |[a, b], []| [a + b]);
    let x = |dims: &[usize], d| dense(dims, d);
    let bias = |d| {
        let layout = Layout::contiguous(Shape::from([64])).broadcast_to(Shape::from([32, 64])).unwrap();
        Operand { address: 4096, layout, dtype: d }
    };
    for d in [DType::F32, DType::BF16, DType::F64, DType::U8, DType::I64] {
        let transposed = Operand { layout: x(&[64, 32], d).layout.permute(&[1, 0]).unwrap(), ..x(&[64, 32], d) };
        for b in [x(&[32, 64], d), bias(d), transposed, Operand { address: 4097, ..x(&[32, 64], d) }] {
            for add_to in [false, true] {
                let to = Target { to: x(&[32, 64], d), add: add_to };
                compile(&source_of(&add, &[In::View(x(&[32, 64], d)), In::View(b)], &[to]).unwrap());
                compile(&source_of(&add, &[In::Own(0), In::View(b)], &[to]).unwrap());
            }
        }
    }
    // Offsets of more than 31 bits.
    let far = Operand { layout: x(&[4, 1 << 31], DType::F32).layout.slice(1, 0, 9, 1).unwrap(), ..x(&[1], DType::F32) };
    compile(&source_of(&add, &[In::View(far), In::View(far)], &[out(&[4, 9], DType::F32)]).unwrap());
}

#[test]
fn every_kind_of_reduction() {
    let same = Program::new("sum", |[x], []| [x]);
    let product = Program::new("dot", |[x, y], [s]| [x * y * s]);
    let placed = Program::build("placed", 1, 0, |b, x, _| vec![x[0] * b.index().cast(DType::F32)]);
    let ops = [ReduceKind::Sum, ReduceKind::Prod, ReduceKind::Max, ReduceKind::Min];
    let shapes: [(&[usize], &[usize]); 6] = [
        (&[64, 512], &[1]),
        (&[64, 512], &[0]),
        (&[8, 16, 32], &[1]),
        (&[8, 16, 32], &[0, 2]),
        (&[1 << 22], &[0]),
        (&[5, 3], &[1]),
    ];
    for (full, reduced) in shapes {
        let kept: Vec<usize> = (0..full.len()).map(|i| if reduced.contains(&i) { 1 } else { full[i] }).collect();
        let all = |map: &Program, d: DType, op: ReduceKind, add: bool| {
            let ins: Vec<Operand> = (0..map.inputs()).map(|_| dense(full, d)).collect();
            let to = Target { to: dense(&kept, d), add };
            sources_of(map, &ins, op, to, full, reduced).unwrap().iter().for_each(compile);
        };
        for d in [DType::F32, DType::BF16, DType::I64] {
            ops.iter().for_each(|op| all(&same, d, *op, *op == ReduceKind::Sum));
        }
        all(&product, DType::F32, ReduceKind::Sum, false);
        all(&placed, DType::F32, ReduceKind::Sum, false);
    }
    for d in computed() {
        for op in ops {
            let to = Target { to: dense(&[32, 1], d), add: true };
            let sources = sources_of(&same, &[dense(&[32, 64], d)], op, to, &[32, 64], &[1]).unwrap();
            sources.iter().for_each(compile);
        }
    }
}

#[test]
fn activations_and_their_derivatives() {
    let activations = Program::build("activations", 1, 0, |_, x, _| {
        vec![
            x[0].relu(),
            x[0].silu(),
            x[0].gelu(),
            x[0].gelu_tanh(),
            x[0].softplus(),
            x[0].log_sigmoid(),
            x[0].sigmoid(),
        ]
    });
    let derivative = activations.differentiate(&[0]);
    for d in [DType::F32, DType::BF16, DType::F64] {
        check(&activations, d, &[d; 7]);
        check(&derivative, d, &[d]);
    }
}

/// An optimizer's step: several outputs in place, `f32` master copies, run-time scalars.
#[test]
fn a_step_in_place() {
    let step = Program::new("adam", |[p, m, v, g], [lr, beta1, beta2, eps]| {
        let m = m * beta1 + g.cast(DType::F32) * (1.0 - beta1);
        let v = v * beta2 + (g.cast(DType::F32) * g.cast(DType::F32)) * (1.0 - beta2);
        [p - m / (v.sqrt() + eps) * lr, m, v]
    });
    for n in [1000, 1001] {
        let ins = [In::Own(0), In::Own(1), In::Own(2), In::View(dense(&[n], DType::BF16))];
        compile(&source_of(&step, &ins, &[out(&[n], DType::F32); 3]).unwrap());
    }
}

/// Compiles the table of hand-written kernels: for each file, every combination of its defines' values.
fn written(wanted: impl Fn(&str) -> bool) {
    let table = include_str!("../../kernels/variants.txt");
    let lines = table.lines().filter(|l| !l.trim().is_empty() && !l.starts_with('#'));
    for line in lines {
        let mut words = line.split_whitespace();
        let file: &'static str = words.next().unwrap();
        let mut variants: Vec<String> = vec![String::new()];
        for define in words {
            let (name, values) = define.split_once('=').unwrap();
            let with = |v: &String| values.split(',').map(|x| format!("{v}#define {name} {x}\n")).collect::<Vec<_>>();
            variants = variants.iter().flat_map(with).collect();
        }
        for (i, defines) in variants.into_iter().enumerate().filter(|_| wanted(file)) {
            let written = HandwrittenKernel::new(file, "", &[]).source().unwrap();
            let source = KernelSource { text: defines + &written.text, entry: file.into(), ..written };
            if i == 0 { compile_everywhere(&source) } else { compile(&source) }
        }
    }
}

// Two tests, because the attention's kernels take as long as all others together.
#[test]
fn every_written_kernel_but_attention() {
    written(|file| !file.starts_with("attention"));
}

#[test]
fn every_attention_kernel() {
    written(|file| file.starts_with("attention"));
}

#[test]
fn attention_by_programs() {
    let bent = Program::build("bent", 8, 0, |_, x, _| {
        let apart = (x[4] / 4 - x[3] / 4).cast_like(x[0]);
        vec![x[7].select((x[0] * x[5] + x[6] * apart).tanh() * 2.0, f64::NEG_INFINITY)]
    });
    let slope = bent.differentiate(&[0, 5, 6]);
    for (position, head_dim) in [(DType::I32, 64), (DType::I64, 128)] {
        let given: Vec<DType> = [DType::F32]
            .into_iter()
            .chain([position; 4])
            .chain([DType::F32, DType::F32, DType::Bool, DType::F32])
            .collect();
        let typed =
            |program: &Program| TypedProgram::new(program, &program.resolve(&given[..program.inputs()], &[]).unwrap());
        let args = given[5..8].into();
        let spec = Arc::new(ScoreSpec { score: typed(&bent), slope: Some(typed(&slope)), args, learned: 2 });
        for element in ["float", "bf16"] {
            for file in ["attention.cu", "attention_grad.cu"] {
                let defines = [("T", element.into()), ("HEAD_DIM", head_dim.into())];
                compile(&HandwrittenKernel::new(file, "", &defines).with_scores(Some(spec.clone())).source().unwrap());
            }
        }
    }
}

#[test]
fn programs_of_scores_round_products_and_sums_apart() {
    let affine = Program::build("affine", 6, 0, |_, x, _| vec![x[0] * x[5] + x[5]]);
    let typed = |program: &Program| {
        let given = [&[DType::F32][..], &[DType::I32; 4], &[DType::F32; 2]].concat();
        TypedProgram::new(program, &program.resolve(&given[..program.inputs()], &[]).unwrap())
    };
    let slope = Some(typed(&affine.differentiate(&[0, 5])));
    let spec = ScoreSpec { score: typed(&affine), slope, args: [DType::F32].into_iter().collect(), learned: 1 };
    let kernel = HandwrittenKernel::new("attention_grad.cu", "", &[("T", "bf16".into()), ("HEAD_DIM", 64.into())]);
    let ptx = COMPILERS[0].ptx(&kernel.with_scores(Some(Arc::new(spec))).source().unwrap()).unwrap();
    assert!(!ptx.contains("fma."));
}

#[test]
fn sixteen_bytes_move_at_once() {
    let add = Program::new("add", |[a, b], []| [a + b]);
    let sum = Program::new("sum", |[x], []| [x]);
    for (d, word) in [(DType::F32, "v4.f32"), (DType::BF16, "v4.u32"), (DType::F16, "v4.u32"), (DType::F64, "v2.f64")] {
        let x = dense(&[1000], d);
        let moved = source_of(&add, &[In::View(x), In::View(x)], &[out(&[1000], d)]).unwrap();
        let read =
            sources_of(&sum, &[dense(&[64, 512], d)], ReduceKind::Sum, out(&[64, 1], d), &[64, 512], &[1]).unwrap();
        let columns =
            sources_of(&sum, &[dense(&[4096, 512], d)], ReduceKind::Sum, out(&[1, 512], d), &[4096, 512], &[0])
                .unwrap();
        let [moved, read, columns] = [&moved, &read[0], &columns[0]].map(|s| COMPILERS[0].ptx(s).unwrap());
        assert!(moved.contains(&format!("st.global.{word}")), "{d}");
        // Eight rows of columns are under way at once: no branch is between their loads.
        let loads: Vec<usize> = columns.match_indices(&format!("ld.global.nc.{word}")).map(|(at, _)| at).collect();
        assert!(loads.windows(8).any(|l| !columns[l[0]..l[7]].contains("bra")), "{d}");
        for ptx in [moved, read, columns] {
            assert!(ptx.contains(&format!("ld.global.nc.{word}")), "{d}");
            assert!(!ptx.contains(".local."), "{d}: registers are not enough");
        }
    }
}
