//! Random numbers of a pipeline: every stage and micro-batch draws its own.

use crate::{pipeline_common::*, prelude::*};

/// A stage that draws a mask of ones and zeros, and appends it to its inputs: an element's binary digits are masks.
struct Draws(Dropout);

impl Module<Cpu> for Draws {
    fn visit(&self, name: &str, visitor: &mut dyn Visitor<Cpu>) {
        self.0.visit(name, visitor);
    }
}

impl Stage<Cpu> for Draws {
    fn forward_values(&self, inputs: &[Var<Cpu>]) -> Result<Vec<Var<Cpu>>> {
        let x = &inputs[0];
        let mask = self.0.forward(&Var::new(Tensor::full(x.runtime(), x.spec().shape, DType::F32, 0.5)?))?;
        Ok(vec![x.mul(2.0)?.add(&mask)?])
    }
}

#[test]
fn every_stage_and_micro_batch_draws_its_own_dropout_mask() {
    const SIZE: usize = 512;
    for (kind, p, v, m) in
        [(ScheduleKind::OneFOneB, 2, 1, 4), (ScheduleKind::Interleaved, 2, 2, 4), (ScheduleKind::Zbv, 2, 2, 4)]
    {
        let checked = checked(kind, p, v, m).unwrap();
        let stages = p * v;
        let outputs = world(p, |comm| {
            let all = (0..stages).map(|_| Ok(Box::new(Draws(Dropout::new(0.5)?)) as Box<dyn Stage<Cpu>>));
            let mut pipeline = pipeline(&comm, &checked, all.collect::<Result<_>>()?)?;
            let zeros = Tensor::zeros(comm.runtime(), [m, SIZE], DType::F32)?;
            let output = pipeline.evaluate(MicroBatches::split(from_ref(&zeros), from_ref(&zeros), m)?)?;
            output.outputs().iter().map(|of| of[0].to_vec::<f32>()).collect::<Result<Vec<_>>>()
        });
        let outputs: Vec<Vec<u32>> =
            outputs.into_iter().flatten().map(|of| of.iter().map(|&v| v as u32).collect()).collect();
        assert_eq!(outputs.len(), m);
        for values in &outputs {
            // Of independent masks 2⁻ˢ of the elements are left; of equal ones a half.
            let left = values.iter().filter(|&&digits| digits == (1 << stages) - 1).count() as f64 / SIZE as f64;
            let due = 0.5f64.powi(stages as i32);
            let spread = 6.0 * (due * (1.0 - due) / SIZE as f64).sqrt();
            assert!((left - due).abs() < spread, "{kind}: {left} of the elements are left, {due} are due");
        }
        let mask =
            |values: &Vec<u32>, stage: usize| values.iter().map(|digits| digits >> stage & 1).collect::<Vec<_>>();
        let masks: BTreeSet<_> = outputs.iter().flat_map(|of| (0..stages).map(move |stage| mask(of, stage))).collect();
        assert_eq!(masks.len(), m * stages, "{kind}: two stages or micro-batches have one mask");
    }
}
