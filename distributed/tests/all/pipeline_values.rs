//! Stages that hand around several values of several types, and the gradients of what goes into the first.

use crate::{pipeline_common::*, prelude::*};

const V: usize = 7;
const C: usize = 4;

/// The parts of a model that hands around more than one value:
/// (tokens, features) → (hidden, tokens, mask, level, unread, empty) → (hidden, level, turned) → output.
#[derive(Module)]
struct Part<R: Runtime> {
    table: Embedding<R>,
    linear: Linear<R>,
    #[module(skip)]
    number: usize,
}

impl Part<Cpu> {
    fn all(rt: &Cpu) -> Vec<Self> {
        let init = Init::new(rt, 3);
        let part = |number| Part {
            table: Embedding::new(&init, V, C).unwrap(),
            linear: Linear::new(&init, C, C).unwrap(),
            number,
        };
        (0..3).map(part).collect()
    }
}

impl Stage<Cpu> for Part<Cpu> {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        match (self.number, inputs) {
            (0, [tokens, features]) => {
                let hidden = self.table.forward(tokens)?.add(&self.linear.forward(features)?)?;
                let (mask, level) = (hidden.gt(0.0)?, hidden.sum(&[-1])?);
                let empty = Var::new(Tensor::zeros(hidden.runtime(), [0, 2], DType::U8)?);
                Ok(vec![hidden.clone(), tokens.clone(), mask, level, hidden.mul(2.0)?, empty])
            }
            (1, [hidden, tokens, mask, level, _, empty]) if empty.dims() == [0, 2] => {
                let zero = Var::new(Tensor::zeros(hidden.runtime(), [1], DType::F32)?);
                let hidden =
                    self.linear.forward(&hidden.where_cond(mask, &zero)?)?.add(&self.table.forward(tokens)?)?;
                // A view, which is sent as a row. One with a gradient would come back in another layout, and be summed in another order.
                Ok(vec![hidden.clone(), level.clone(), hidden.detach().transpose(0, 2)?])
            }
            (2, [hidden, level, fixed]) => {
                let hidden = self.linear.forward(&hidden.add(&fixed.transpose(0, 2)?)?)?;
                Ok(vec![hidden.mul(&level.unsqueeze(-1)?)?.tanh()?, level.clone()])
            }
            _ => Err(Error::argument("part", format!("{} values into part {}", inputs.len(), self.number))),
        }
    }
}

fn part_loss(outputs: &[Var<Cpu>], targets: &[Var<Cpu>]) -> Result<Loss<Cpu>> {
    let difference = outputs[0].sub(&targets[0])?.square()?.sum_all()?;
    Loss::sum(difference.add(&outputs[1].sum_all()?)?, 1.0)
}

fn part_batch(rt: &Cpu, m: usize) -> MicroBatches<Cpu> {
    let tokens: Vec<i64> = (0..m * 6).map(|k| ((k * k + 1) % V) as i64).collect();
    let tokens = Tensor::from_slice(rt, [m * 2, 3], &tokens).unwrap();
    let features = Tensor::uniform(rt, [m * 2, 3, C], DType::F32, -1.0, 1.0, 8).unwrap();
    let targets = Tensor::uniform(rt, [m * 2, 3, C], DType::F32, -1.0, 1.0, 9).unwrap();
    MicroBatches::split(&[tokens, features], &[targets], m).unwrap()
}

/// Gradients of the parameters and of the features of each micro-batch, on one rank without stages' boundaries.
fn parts_alone(m: usize, order: &[usize]) -> (Vec<f32>, Numbers, Vec<Vec<f32>>) {
    let rt = cpu(0).unwrap();
    let (parts, batch) = (Part::all(&rt), part_batch(&rt, m));
    let mut gradients = autograd::Gradients::new();
    let (mut losses, mut of_features) = (vec![0.0; m], vec![Vec::new(); m]);
    for &micro in order {
        let features = Var::leaf("features", batch.inputs[micro][1].clone()).unwrap();
        let inputs = vec![Var::new(batch.inputs[micro][0].clone()), features.clone()];
        let outputs = parts.iter().try_fold(inputs, |x, part| part.forward_values(&x)).unwrap();
        let loss = part_loss(&outputs, &[Var::new(batch.targets[micro][0].clone())]).unwrap();
        autograd::backward_with_hooks(loss.total(), &mut gradients).unwrap();
        losses[micro] = loss.total().item().unwrap() as f32;
        of_features[micro] = gradients.of(&features).unwrap().to_vec::<f32>().unwrap();
    }
    (losses, named(parts.iter().map(|part| part as &dyn Stage<Cpu>).enumerate(), &gradients), of_features)
}

fn named<'a>(
    stages: impl Iterator<Item = (usize, &'a dyn Stage<Cpu>)>,
    gradients: &autograd::Gradients<Cpu>,
) -> Numbers {
    let of = |(stage, module): (usize, &dyn Stage<Cpu>)| {
        let named = module.named_parameters().into_iter();
        let value = |p: Param<Cpu>| gradients.get(&p.leaf()).map_or(Vec::new(), |g| g.to_vec::<f32>().unwrap());
        named.map(|(name, p)| (format!("{stage}.{name}"), value(p))).collect::<Vec<_>>()
    };
    stages.flat_map(of).collect()
}

/// The order in which micro-batches' gradients are added up.
fn order(checked: &Checked) -> Vec<usize> {
    let passes = checked.schedule().actions().flat_map(|(_, _, action)| action.computes());
    passes.filter(|c| c.stage == 0 && c.pass.makes_weight_gradient()).map(|c| c.micro).collect()
}

#[test]
fn several_values_of_several_types_and_the_inputs_gradients() {
    // Three stages on three ranks, and on one: B alone, and I with W.
    let mut runs = 0;
    for (p, v) in [(3, 1), (1, 3)] {
        for (kind, checked) in kinds(p, v, 5) {
            let (losses, want, features) = parts_alone(5, &order(&checked));
            let ranks = world(p, |comm| {
                let options = PipelineOptions { input_gradients: true, ..Default::default() };
                let parts = PipelineModel::on(comm.rank(), checked.clone(), Part::all(comm.runtime())).loss(part_loss);
                let mut pipeline = Pipeline::new(&comm, parts.options(options))?;
                let mut hooks: BTreeMap<usize, autograd::Gradients<Cpu>> =
                    pipeline.stages().keys().map(|&stage| (stage, autograd::Gradients::new())).collect();
                let output = pipeline.run(part_batch(comm.runtime(), 5), &mut hooks)?;
                let first = comm.rank() == 0;
                assert_eq!(output.input_gradients().len(), if first { 5 } else { 0 });
                let of_inputs =
                    output.input_gradients().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()?;
                let mut numbers = Numbers::new();
                for (&stage, module) in pipeline.stages() {
                    numbers.extend(named([(stage, &**module)].into_iter(), &hooks[&stage]));
                }
                let told = pipeline.losses(&output)?.into_iter().map(|(sum, _)| sum as f32).collect::<Vec<_>>();
                Ok((told, numbers, of_inputs))
            });
            assert!(ranks.iter().all(|(told, ..)| *told == losses), "{kind}");
            assert_eq!(ranks[0].2, features, "{kind}");
            let got: Numbers = ranks.into_iter().flat_map(|(_, numbers, _)| numbers).collect();
            assert_eq!(got, want, "{kind}");
            runs += 1;
        }
    }
    assert!(runs >= 8, "{runs}");
}
