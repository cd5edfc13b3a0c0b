//! What a summary says of a forward pass, against formulas and the memory that is really kept.

use std::sync::{Arc, Mutex};

use autograd::{Var, checkpoint, no_grad};
use nn::{
    Conv2d, ConvOptions, Forward, Gpt, GptConfig, Hooked, Init, Linear, Module, ModuleExt, ModuleSummary, Relu,
    Runtime, Sequential,
};
use numcore::{
    DType, MemoryCategory, NullRuntime, Result, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps},
};
use runtime_cpu::Cpu;

fn of<'a>(summary: &'a ModuleSummary, path: &str) -> &'a nn::ModuleRow {
    summary.module(path).unwrap_or_else(|| panic!("no `{path}` in\n{summary}"))
}

fn x<R: Runtime>(rt: &R, shape: &[usize]) -> Var<R> {
    Var::new(Tensor::zeros(rt, shape, DType::F32).unwrap())
}

#[test]
fn a_gpt_has_the_flops_of_its_formula() {
    let rt = NullRuntime::new();
    let (b, t, c, v, heads, layers) = (2u64, 16u64, 32u64, 50u64, 4, 3u64);
    let config = GptConfig { vocab: 50, context: 16, layers: 3, heads, width: 32, ..GptConfig::default() };
    let model = Gpt::new(&Init::new(&rt, 0), config).unwrap();
    let tokens = Tensor::zeros(&rt, [2, 16], DType::I64).unwrap();
    let summary = model.summarize(|| model.forward(&Var::new(tokens.clone()))).unwrap();

    let rows = b * t;
    let (qkv, proj, mlp) = (2 * rows * c * 3 * c, 2 * rows * c * c, 2 * 2 * rows * c * 4 * c);
    // Scores and values, of all queries with all keys.
    let attention = 2 * 2 * b * t * t * c;
    let block = qkv + proj + mlp + attention;
    assert_eq!(of(&summary, "").flops, layers * block + 2 * rows * c * v);
    for layer in 0..layers {
        assert_eq!(of(&summary, &format!("blocks.{layer}")).flops, block);
        // Attention itself reads no parameter: it is the block's.
        let parts = ["qkv", "proj", "fc1", "fc2"].map(|part| of(&summary, &format!("blocks.{layer}.{part}")).flops);
        assert_eq!(parts, [qkv, proj, mlp / 2, mlp / 2]);
    }
    let whole = of(&summary, "");
    assert_eq!(whole.parameters, model.num_parameters());
    assert_eq!(whole.parameter_bytes, 4 * whole.parameters.total as u64);
    assert_eq!(whole.output.unwrap().shape.to_vec(), [2, 16, 50]);
    assert_eq!(of(&summary, "wte").output.unwrap().shape.to_vec(), [32, 32]);
    assert_eq!(of(&summary, "blocks.1").depth, of(&summary, "blocks.1.qkv").depth - 1);

    // Frozen parts are computed all the same, and keep nothing.
    model.freeze();
    let frozen = model.summarize(|| model.forward(&Var::new(tokens.clone()))).unwrap();
    assert_eq!((of(&frozen, "").flops, of(&frozen, "").saved_bytes), (whole.flops, 0));
    assert_eq!(of(&frozen, "").parameters.trainable, 0);
}

#[test]
fn shared_parameters_are_counted_once() {
    let rt = NullRuntime::new();
    let config =
        GptConfig { vocab: 50, context: 8, layers: 1, heads: 2, width: 8, tied_head: true, ..GptConfig::default() };
    let model = Gpt::new(&Init::new(&rt, 0), config).unwrap();
    let tokens = Var::new(Tensor::zeros(&rt, [1, 8], DType::I64).unwrap());
    let summary = model.summarize(|| model.forward(&tokens)).unwrap();
    assert_eq!(of(&summary, "").parameters, model.num_parameters());
    assert_eq!(of(&summary, "wte").parameters.total, 400);
}

#[test]
fn convolutions_have_the_flops_of_their_formula() -> Result<()> {
    let rt = NullRuntime::new();
    let conv = Conv2d::new(&Init::new(&rt, 0), 4, 6, [3, 3], ConvOptions::default())?;
    let summary = conv.summarize(|| conv.forward(&x(&rt, &[2, 4, 10, 8])))?;
    // No padding: 8 × 6 positions.
    assert_eq!(of(&summary, "").flops, 2 * (2 * 6 * 8 * 6) * (4 * 3 * 3));
    assert_eq!(of(&summary, "").output.unwrap().shape.to_vec(), [2, 6, 8, 6]);
    Ok(())
}

/// The tape of a model that keeps what it keeps for one reason after another: inputs, outputs, recipes.
#[test]
fn bytes_kept_are_those_that_stay_in_memory() -> Result<()> {
    let rt = Cpu::with_threads(1);
    let config = GptConfig { vocab: 64, context: 16, layers: 2, heads: 2, width: 64, ..GptConfig::default() };
    let model = Gpt::new(&Init::new(&rt, 0), config)?;
    let tokens = Var::new(Tensor::zeros(&rt, [4, 16], DType::I64)?);
    let live = || numcore::Runtime::memory(&rt).of(MemoryCategory::Activations).live;
    let mut kept = None;
    let before = live();
    let summary = model.summarize(|| {
        let loss = model.forward(&tokens)?.square()?.sum_all()?;
        kept = Some(loss.clone());
        Ok(loss)
    })?;
    // The tokens were there before, and the loss itself is not kept for its gradient.
    let (saved, grown) = (of(&summary, "").saved_bytes, (live() - before) as u64);
    let slack = 32 * 1024;
    assert!(saved.abs_diff(grown) < slack, "the tape keeps {saved} bytes, memory grew by {grown}");
    assert!(saved > 10 * slack, "{saved}");
    drop(kept);
    assert_eq!(live(), before);
    Ok(())
}

#[test]
fn a_checkpointed_segment_keeps_its_inputs_alone() -> Result<()> {
    let rt = NullRuntime::new();
    let init = Init::new(&rt, 0);
    let model = Sequential::new().push(Linear::new(&init, 8, 64)?).push(Relu).push(Linear::new(&init, 64, 8)?);
    let input = x(&rt, &[16, 8]);
    let plain = model.summarize(|| model.forward(&input))?;
    let short = model.summarize(|| checkpoint(|| model.forward(&input)))?;
    assert_eq!(of(&short, "").flops, of(&plain, "").flops);
    assert_eq!(of(&short, "").saved_bytes, 16 * 8 * 4);
    // The input, and what the activation or the second product reads.
    assert!(of(&plain, "").saved_bytes >= (16 * 8 + 16 * 64) * 4);
    let nothing = model.summarize(|| no_grad(|| model.forward(&input)))?;
    assert_eq!((of(&nothing, "").flops, of(&nothing, "").saved_bytes), (of(&plain, "").flops, 0));
    Ok(())
}

/// Two layers and what is between them.
#[derive(Module)]
struct Two<R: Runtime> {
    first: Linear<R>,
    second: Linear<R>,
}

#[test]
fn what_stands_between_layers_is_of_what_holds_both() -> Result<()> {
    let rt = NullRuntime::new();
    let init = Init::new(&rt, 0);
    let model = Sequential::new().push(Linear::new(&init, 4, 4)?);
    let two = Two { first: Linear::new(&init, 4, 4)?, second: Linear::new(&init, 4, 4)? };
    let summary = two.summarize(|| {
        let h = two.first.forward(&x(&rt, &[3, 4]))?.exp()?;
        let h = h.matmul(&x(&rt, &[4, 4]))?;
        two.second.forward(&h)?.exp()
    })?;
    let each = 2 * 3 * 4 * 4;
    assert_eq!(["", "first", "second"].map(|path| of(&summary, path).flops), [3 * each, each, each]);
    assert_eq!(["", "first", "second"].map(|path| of(&summary, path).ops), [5, 1, 1]);
    assert!(
        model.summarize(|| model.forward(&x(&rt, &[3, 5]))).is_err(),
        "an error of the forward pass is the summary's"
    );
    Ok(())
}

#[test]
fn the_table_is_aligned_and_sums() -> Result<()> {
    let rt = NullRuntime::new();
    let init = Init::new(&rt, 0);
    let model = Sequential::new().push(Linear::new(&init, 8, 1000)?).push(Relu).push(Linear::new(&init, 1000, 8)?);
    let table = model.summarize(|| model.forward(&x(&rt, &[4, 8])))?.to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("module") && lines[0].ends_with("saved bytes"), "{table}");
    assert!(
        lines[2].starts_with("(model)") && lines[2].contains("f32 [4, 8]") && lines[2].contains("128,000"),
        "{table}"
    );
    assert!(lines[3].starts_with("  0 ") && lines[3].contains("64,000"), "{table}");
    let width = lines[1].chars().count();
    assert!(lines[..lines.len() - 2].iter().all(|line| line.chars().count() == width), "{table}");
    assert!(
        table.ends_with("bytes kept for backward\n")
            && table.contains("17,008 parameters, 17,008 trained, 68,032 bytes")
    );
    Ok(())
}

#[test]
fn outputs_of_modules_are_their_values() -> Result<()> {
    let (cpu, x) = (Cpu::new(), Tensor::uniform(&Cpu::new(), [3, 8], DType::F32, -1.0, 1.0, 1)?);
    let init = Init::new(&cpu, 0);
    let inner = Sequential::new().push(Linear::new(&init, 8, 6)?).push(Relu).push(Linear::new(&init, 6, 6)?);
    let model = Sequential::new().push(inner).push(Linear::new(&init, 6, 2)?);
    let (y, outputs) = model.module_outputs(|| model.forward(&Var::new(x.clone())))?;
    let names: Vec<&str> = outputs.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["", "0", "0.0", "0.2", "1"]);
    let values = |name: &str| outputs.iter().find(|(n, _)| n == name).expect("a module").1.to_f64s();
    assert_eq!((values("")?, values("1")?), (y.value()?.to_f64s()?, y.value()?.to_f64s()?));
    let parameter = |name: &str| model.named_parameters().into_iter().find(|(n, _)| n == name).expect("it").1.value();
    let hidden = x.matmul(&parameter("0.0.weight")?.transpose(0, 1)?)?.add(&parameter("0.0.bias")?)?.to_f64s()?;
    assert!(values("0.0")?.iter().zip(&hidden).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_eq!(values("0")?, values("0.2")?);
    // An error of the pass is returned.
    let wrong = Var::new(Tensor::ones(&cpu, [3, 7], DType::F32)?);
    assert!(model.module_outputs(|| model.forward(&wrong)).is_err());
    Ok(())
}

#[test]
fn a_hook_sees_both_ends_and_gives_the_output() -> Result<()> {
    let (cpu, init) = (Cpu::new(), Init::new(&Cpu::new(), 0));
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    let hooked = Hooked::new(Linear::new(&init, 4, 3)?, move |x, y| {
        seen.lock().unwrap().push((x.dims(), y.dims()));
        y.mul(2.0)
    });
    let plain = Linear::new(&init, 4, 3)?;
    let names = |module: &dyn Module<Cpu>| module.named_parameters().into_iter().map(|(n, _)| n).collect::<Vec<_>>();
    assert_eq!(names(&hooked), names(&plain));
    plain.copy_from(&hooked)?;
    let x = Var::leaf("x", Tensor::uniform(&cpu, [2, 4], DType::F64, -1.0, 1.0, 1)?.to_dtype(DType::F32)?)?;
    let gradient = |layer: &dyn Forward<Cpu>| -> Result<Vec<f64>> {
        layer.forward(&x)?.square()?.sum_all()?.backward()?.of(&x).expect("a gradient").to_f64s()
    };
    let of_twice: Vec<f64> = gradient(&plain)?.into_iter().map(|g| 4.0 * g).collect();
    assert_eq!(gradient(&hooked)?, of_twice);
    // A recomputation repeats operations, and calls no hook.
    let loss = checkpoint(|| hooked.forward(&x)?.square()?.sum_all())?;
    assert_eq!(loss.backward()?.of(&x).expect("a gradient").to_f64s()?, of_twice);
    assert_eq!(*calls.lock().unwrap(), vec![(vec![2, 4], vec![2, 3]); 2]);
    Ok(())
}
