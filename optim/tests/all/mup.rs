//! The maximal update parametrization: its table, and sizes of activations over widths.

use autograd::{Var, no_grad};
use nn::{Forward, Init, Linear, Module, ModuleExt};
use numcore::{DType, Result, Runtime, Tensor, fused::Reduction, ops::PointwiseOps};
use optim::*;
use runtime_cpu::Cpu;

#[derive(Module)]
#[module(crate = "::nn")]
struct Net<R: Runtime> {
    a: Linear<R>,
    b: Linear<R>,
    c: Linear<R>,
}

impl Net<Cpu> {
    fn new(width: usize, outputs: usize) -> Result<Self> {
        let init = Init::new(&Cpu::new(), 5).dtype(DType::F64);
        let (a, b) = (Linear::new(&init, 8, width)?, Linear::new(&init, width, 2 * width)?);
        Ok(Net { a, b, c: Linear::new(&init, 2 * width, outputs)? })
    }

    fn mup(&self, base: usize) -> Result<MaximalUpdate> {
        let mup = MaximalUpdate::new(&Net::new(base, 1)?, self, |name| name.starts_with("c."))?;
        mup.rescale(self)?;
        Ok(mup)
    }

    fn forward(&self, x: &Var<Cpu>) -> Result<Var<Cpu>> {
        self.c.forward(&self.b.forward(&self.a.forward(x)?.tanh()?)?.tanh()?)
    }

    fn rms(&self, of: &str) -> f64 {
        let (_, p) = self.named_parameters().into_iter().find(|(name, _)| name == of).unwrap();
        let all = p.leaf().value().unwrap().to_f64s().unwrap();
        (all.iter().map(|x| x * x).sum::<f64>() / all.len() as f64).sqrt()
    }
}

/// The mean magnitudes of the three layers' outputs after some steps of a rule, less those before.
fn sizes(width: usize, rule: Option<WidthRule>, adam: bool) -> Result<Vec<f64>> {
    let (net, rt) = (Net::new(width, 1)?, Cpu::new());
    let mup = rule.map(|_| net.mup(32)).transpose()?;
    let x = Var::new(Tensor::normal(&rt, [16, 8], DType::F64, 0.0, 1.0, 1)?);
    let y = Var::new(Tensor::normal(&rt, [16, 1], DType::F64, 0.0, 1.0, 2)?);
    let source = match (adam, mup.zip(rule)) {
        (true, None) => ParamGroups::new(AdamWConfig { lr: 0.01, ..Default::default() }).into_source(),
        (true, Some((mup, rule))) => {
            mup.groups(ParamGroups::new(AdamWConfig { lr: 0.01, ..Default::default() }), rule).into_source()
        }
        (false, None) => ParamGroups::new(SgdConfig { lr: 0.1, ..Default::default() }).into_source(),
        (false, Some((mup, rule))) => {
            mup.groups(ParamGroups::new(SgdConfig { lr: 0.1, ..Default::default() }), rule).into_source()
        }
    };
    let mut source: OptimizerSource<Cpu> = source;
    net.named_parameters();
    let mut optimizer = source.optimizer(net.parameters().iter().map(|p| p.leaf()).collect())?;
    for _ in 0..4 {
        optimizer.backward(&nn::loss::mse(&net.forward(&x)?, &y, Reduction::Mean)?)?;
        optimizer.step()?;
    }
    let sizes = no_grad(|| coordinate_sizes::<Cpu, _>(|| net.forward(&x)))?;
    let names: Vec<&str> = sizes.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a.weight", "b.weight", "c.weight"]);
    Ok(sizes.into_iter().map(|(_, size)| size).collect())
}

/// The exponent of width with which the sizes of layer `k` grow, by least squares.
fn growth(of: &[(usize, Vec<f64>)], k: usize) -> f64 {
    let points: Vec<(f64, f64)> = of.iter().map(|(width, sizes)| ((*width as f64).ln(), sizes[k].ln())).collect();
    let n = points.len() as f64;
    let mean = points.iter().fold((0.0, 0.0), |m, p| (m.0 + p.0 / n, m.1 + p.1 / n));
    let cross: f64 = points.iter().map(|p| (p.0 - mean.0) * (p.1 - mean.1)).sum();
    cross / points.iter().map(|p| (p.0 - mean.0).powi(2)).sum::<f64>()
}

#[test]
fn activations_are_as_large_at_every_width() -> Result<()> {
    for (adam, rule) in [(true, WidthRule::Adaptive), (false, WidthRule::Sgd)] {
        let over = |rule: Option<WidthRule>| -> Result<Vec<(usize, Vec<f64>)>> {
            [32, 64, 128, 256].into_iter().map(|width| Ok((width, sizes(width, rule, adam)?))).collect()
        };
        let (mup, standard) = (over(Some(rule))?, over(None)?);
        for k in 0..2 {
            assert!(growth(&mup, k).abs() < 0.1, "{rule:?}, layer {k}: {mup:?}");
        }
        let most = (0..3).map(|k| growth(&standard, k).abs()).fold(0.0, f64::max);
        assert!(most > 0.25, "{rule:?}: {standard:?}");
    }
    Ok(())
}

#[test]
fn factors_are_those_of_the_table() -> Result<()> {
    let (base, net) = (Net::new(16, 1)?, Net::new(64, 1)?);
    let mup = net.mup(16)?;
    for (name, factor) in [("a.weight", 1.0), ("a.bias", 1.0), ("b.weight", 0.5), ("c.weight", 0.25)] {
        let (got, want) = (net.rms(name), base.rms(name) * factor);
        assert!((got - want).abs() < 1e-12 * want, "{name}: {got} {want}");
    }
    let config = AdamWConfig { lr: 0.4, weight_decay: 0.1, ..Default::default() };
    for (rule, want) in [
        (
            WidthRule::Adaptive,
            [("a.weight", 0.4), ("b.bias", 0.4), ("b.weight", 0.1), ("c.weight", 0.1), ("c.bias", 0.4)],
        ),
        (WidthRule::Sgd, [("a.weight", 1.6), ("b.bias", 1.6), ("b.weight", 0.4), ("c.weight", 0.1), ("c.bias", 0.4)]),
    ] {
        let groups = mup.groups(ParamGroups::decay_matrices(config.clone()), rule);
        let all = Shards::<Cpu>::hyper_parameters(&groups)?;
        for (name, lr) in want {
            let (_, p) = net.named_parameters().into_iter().find(|(n, _)| n == name).unwrap();
            let own = &all[Shards::<Cpu>::group(&groups, name, &p.leaf().spec())];
            let of = |what: &str| own.values.iter().find(|(n, _)| n == what).unwrap().1[0];
            assert!((of("lr") - lr).abs() < 1e-12, "{rule:?} {name}: {}", of("lr"));
            let decay = if name.ends_with("bias") { 0.0 } else { 0.4 * 0.1 };
            assert!((of("lr") * of("weight_decay") - decay).abs() < 1e-12, "{rule:?} {name}");
        }
    }
    Ok(())
}

#[test]
fn models_that_differ_in_more_than_widths_are_refused() -> Result<()> {
    let error = MaximalUpdate::new(&Net::new(16, 1)?.a, &Net::new(16, 1)?, |_| false).unwrap_err().to_string();
    assert!(error.contains("`a.weight` is in the model alone") && error.contains("`weight` is in the base"), "{error}");
    let net = Net::new(8, 1)?;
    let before = net.rms("b.weight");
    scale_parameters(&net, |name| if name == "b.weight" { 0.5 } else { 1.0 })?;
    assert!((net.rms("b.weight") - before * 0.5).abs() < 1e-12);
    Ok(())
}
