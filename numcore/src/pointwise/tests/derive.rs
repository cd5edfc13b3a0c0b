//! Derivatives compared with finite differences in `f64`, and with PyTorch's choices at points without a derivative.

use proptest::prelude::*;

use super::*;

/// Points at which to test an op: inside its domain, away from its discontinuities.
fn places(op: Unary) -> &'static [f64] {
    match op {
        Unary::Log | Unary::Log2 | Unary::Sqrt | Unary::Rsqrt => &[0.3, 1.0, 2.5, 40.0],
        Unary::Log1p => &[-0.6, 0.01, 2.5],
        Unary::Asin | Unary::Acos => &[-0.9, -0.2, 0.1, 0.8],
        Unary::Recip => &[-2.0, -0.3, 0.7, 3.0],
        _ => &[-2.3, -0.7, 0.2, 1.1, 2.6],
    }
}

fn check(program: &Program, wrt: usize, at: &[f64]) {
    let what = format!("{program} wrt {wrt} at {at:?}");
    assert_close(slope(program, wrt, at), difference(program, wrt, at), 1e-8, &what);
}

/// Checks the derivative, and the derivative of the derivative.
fn check_twice(program: &Program, wrt: usize, at: &[f64]) {
    check(program, wrt, at);
    let Some(d) = program.derivative(wrt) else { return };
    let ins: Vec<f64> = d.inputs.iter().map(|&k| at.get(k as usize).copied().unwrap_or(1.3)).collect();
    (0..ins.len()).for_each(|i| check(&d.program, i, &ins));
}

#[test]
fn unary_ops_against_differences() {
    for &op in Unary::ALL.iter().filter(|&&op| op != Unary::Not) {
        places(op).iter().for_each(|&x| check_twice(&unary_program(op), 0, &[x]));
    }
}

#[test]
fn binary_ops_against_differences() {
    use Binary::*;
    let points = [[0.7, 1.9], [2.5, 0.4], [1.2, -1.7], [3.1, 2.2]];
    for op in [Add, Sub, Mul, Div, Rem, Pow, Atan2, Max, Min] {
        for at in points.iter().filter(|at| op != Pow || at[0] > 0.0) {
            (0..2).for_each(|wrt| check_twice(&binary_program(op), wrt, at));
        }
    }
}

fn activations() -> Vec<Program> {
    vec![
        Program::new("sigmoid", |[x], []| [x.sigmoid()]),
        Program::new("silu", |[x], []| [x.silu()]),
        Program::new("gelu", |[x], []| [x.gelu()]),
        Program::new("gelu_tanh", |[x], []| [x.gelu_tanh()]),
        Program::new("softplus", |[x], []| [x.softplus_with(2.0, 20.0)]),
        Program::new("log_sigmoid", |[x], []| [x.log_sigmoid()]),
        Program::new("relu", |[x], []| [x.relu()]),
        Program::new("clamp", |[x], []| [x.clamp(-1.0, 2.0)]),
        Program::new("cube", |[x], []| [x.pow_f(3.0)]),
        Program::new("power", |[x], []| [(x * x).pow_f(1.7)]),
        Program::new("half", |[x], []| [(x * x + 1.0).pow_f(-0.5)]),
    ]
}

#[test]
fn activations_against_differences() {
    for program in activations() {
        [-3.1, -0.8, -1e-3, 1e-3, 0.6, 1.9, 4.2].iter().for_each(|&x| check_twice(&program, 0, &[x]));
    }
}

#[test]
fn slopes_that_are_chosen() {
    let at = |f: Write, x: f64| slope(&Program::new("chosen", |[x], []| [f(x)]), 0, &[x]);
    assert_eq!(at(|x| x.relu(), 0.0), 0.0);
    assert_eq!(at(|x| x.abs(), 0.0), 0.0);
    assert_eq!(at(|x| x.clamp(-1.0, 2.0), -1.0), 0.0);
    assert_eq!(at(|x| x.clamp(-1.0, 2.0), 2.0), 0.0);
    assert_eq!(at(|x| x.clamp(-1.0, 2.0), 2.5), 0.0);
    assert_eq!(at(|x| x.sigmoid(), 0.0), 0.25);
    assert_eq!(at(|x| x.log_sigmoid(), 0.0), 0.5);
    assert_eq!(at(|x| x.pow(0.0), 0.0), 0.0);
    assert_eq!(at(|x| x.pow(2.0), 0.0), 0.0);
    let (max, min, pow) = (binary_program(Binary::Max), binary_program(Binary::Min), binary_program(Binary::Pow));
    for wrt in 0..2 {
        assert_eq!([slope(&max, wrt, &[3.0, 3.0]), slope(&min, wrt, &[3.0, 3.0])], [0.5; 2]);
        assert_eq!(slope(&max, wrt, &[1.0, 2.0]), wrt as f64);
        assert_eq!(slope(&min, wrt, &[1.0, 2.0]), 1.0 - wrt as f64);
    }
    assert_eq!(slope(&pow, 1, &[0.0, 2.0]), 0.0);
    assert_eq!(slope(&pow, 1, &[0.0, 0.0]), 0.0);
    assert_eq!(slope(&pow, 0, &[0.0, 0.0]), 0.0);
}

/// Derivatives stay finite far from 0, where a factor overflows.
#[test]
fn no_zero_times_infinity() {
    let programs = activations();
    let f32_slope = |p: &Program, x: f64| {
        let d = p.derivative(0).unwrap();
        let ins: Vec<f64> = d.inputs.iter().map(|&k| if k == 0 { x } else { 1.0 }).collect();
        run(&d.program, DType::F32, &ins, &[])[0]
    };
    for (program, [low, high]) in
        programs.iter().zip([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    {
        for (x, want) in [(-200f64, low), (-1e30, low), (200.0, high), (1e30, high)] {
            if !(program.name() == "gelu_tanh" && x.abs() > 1e20) {
                assert_eq!(f32_slope(program, x), want, "{} at {x}", program.name());
            }
        }
    }
    let safe = Program::new("safe_sqrt", |[x], []| [x.gt(0.0).select(x.sqrt(), 0.0)]);
    assert_eq!(slope(&safe, 0, &[0.0]), 0.0);
    let elu = Program::new("elu", |[x], []| [x.gt(0.0).select(x, x.expm1())]);
    assert_eq!([slope(&elu, 0, &[1e4]), slope(&elu, 0, &[-1e4])], [1.0, 0.0]);
    let curve = elu.derivative(0).unwrap();
    assert_eq!(curve.inputs[..], [0, 1]);
    assert_eq!([slope(&curve.program, 0, &[1e4, 1.0]), slope(&curve.program, 1, &[1e4, 1.0])], [0.0, 1.0]);
}

#[test]
fn what_has_no_slope_has_no_derivative() {
    let through = |f: Write| Program::new("step", |[x], []| [f(x)]).derivative(0).is_none();
    assert!(through(|x| x.floor()) && through(|x| x.sign() + x.round()));
    assert!(through(|x| x.gt(0.0).cast(DType::F32)) && through(|x| x.cast(DType::I32).cast(DType::F32)));
    assert!(through(|x| x.gt(0.0).select(1.0, 2.0)));
    assert!(!through(|x| x.cast(DType::F16).cast(DType::F32)));
    let unused = Program::new("unused", |[x, _], []| [x]);
    assert!(unused.derivative(1).is_none() && unused.derivative(2).is_none());
}

#[test]
fn a_derivative_takes_only_what_it_reads() {
    let reads = |p: Program, wrt: usize| p.derivative(wrt).unwrap().inputs.to_vec();
    assert_eq!(reads(Program::new("add", |[a, b], []| [a + b]), 1), [2]);
    assert_eq!(reads(Program::new("mul", |[a, b], []| [a * b]), 0), [1, 2]);
    assert_eq!(reads(Program::new("two", |[a, b], []| [a * 2.0, a * b]), 0), [1, 2, 3]);
    assert!(Program::new("add", |[a, b], []| [a + b]).derivative(0).unwrap().program.is_identity());
}

#[test]
fn several_at_once() {
    let p = Program::new("several", |[a, b, c], []| [a * b + c.floor(), b.exp()]);
    let d = p.differentiate(&[0, 1, 2]);
    assert_eq!((d.inputs(), d.outputs().len()), (5, 3));
    assert_eq!(run(&d, DType::F64, &[2.0, 0.5, 7.0, 10.0, 100.0], &[]), [5.0, 20.0 + 100.0 * 0.5f64.exp(), 0.0]);
    let turned = run(&p.differentiate(&[1, 0, 2]), DType::F64, &[2.0, 0.5, 7.0, 10.0, 100.0], &[]);
    assert_eq!(turned, [20.0 + 100.0 * 0.5f64.exp(), 5.0, 0.0]);
    let typed = d.resolve(&[DType::BF16; 5], &[]).unwrap();
    assert!(d.outputs().iter().all(|&o| typed.dtypes[o as usize] == DType::BF16));
}

#[test]
fn gradients_come_back_in_the_type_they_left() {
    let p = Program::new("wide", |[x, y], []| [x.cast(DType::F32).exp() * y]);
    let d = p.derivative(0).unwrap();
    let types: Vec<DType> = d.inputs.iter().map(|&k| if k == 0 { DType::BF16 } else { DType::F32 }).collect();
    let typed = d.program.resolve(&types, &[]).unwrap();
    assert_eq!(typed.dtypes[d.program.outputs()[0] as usize], DType::BF16);
}

/// The gradient terms of the two branches of a `select` become one `select`, without adding zeros.
#[test]
fn choices_stay_choices() {
    let p = Program::new("leaky", |[x], []| [x.gt(0.0).select(x, x * 0.1)]);
    let d = p.derivative(0).unwrap().program.to_string();
    let lines: Vec<&str> = d.lines().map(str::trim).collect();
    assert_eq!(
        lines[1..lines.len() - 2],
        ["v2 = lt(0.0, in0)", "v5 = mul(in1, 0.1)", "v6 = select(v2, in1, v5)"],
        "{d}"
    );
}

/// Smooth and bounded ops, so that differences are good to many digits.
fn smooth<'b>(kind: u8, a: Expr<'b>, b: Expr<'b>) -> Expr<'b> {
    match kind % 10 {
        0 => a + b,
        1 => a - b * 0.5,
        2 => (a * b).sin(),
        3 => a.tanh() * b,
        4 => a / (b * b + 1.0),
        5 => (a * 0.3).cos().exp(),
        6 => (a * a + 0.5).sqrt(),
        7 => a.sigmoid() - b.atan(),
        8 => (a * a + 0.2).log(),
        _ => a.erf() * b.gelu(),
    }
}

proptest! {
    #[test]
    fn random_programs_against_differences(
        steps in prop::collection::vec((any::<u8>(), any::<u8>(), any::<u8>()), 1..8),
        at in prop::array::uniform3(-1.5f64..1.5),
    ) {
        let b = ProgramBuilder::default();
        let mut ids: Vec<u32> = (0..3).map(|i| b.input(i).id()).collect();
        for (kind, l, r) in steps {
            let pick = |k: u8| b.expr(ids[k as usize % ids.len()]);
            let id = smooth(kind, pick(l), pick(r)).id();
            ids.push(id);
        }
        let program = b.finish("random", 3, 0, &[b.expr(ids[ids.len() - 1]).tanh()]);
        for wrt in 0..3 {
            let (got, want) = (slope(&program, wrt, &at), difference(&program, wrt, &at));
            prop_assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "{program}\nwrt {wrt} at {at:?}: {got} is not {want}");
        }
    }
}
