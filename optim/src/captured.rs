//! Updates in captured steps. A captured launch repeats the host's numbers of the capture. So an update that needs
//! other numbers is an error there, or reads them from device memory that is written before each launch.

use std::{ops::Range, sync::Arc};

use numcore::{
    DType, Error, Flat, FlatLayout, MemoryCategory, Result, Runtime, Scalar, Shape, Tensor,
    ops::ViewOps,
    pointwise::{Number, Program},
};
use smallvec::{SmallVec, smallvec};

use crate::{StepContext, UpdateRule};

/// Returns an error if an update is being captured that would differ in the next step.
pub(crate) fn require_replayable<R: Runtime, C: UpdateRule>(
    rt: Option<&R>,
    scheduled: bool,
    groups: &[C],
) -> Result<()> {
    if !rt.is_some_and(Runtime::is_capturing) {
        return Ok(());
    }
    let why = match scheduled {
        true => "the learning rate follows a schedule",
        false if groups.iter().any(|rule| rule.sum_count() > 0) => "the update adapts to sums that the host reads",
        false if groups.iter().any(depends_on_step) => "the update depends on the number of steps",
        false => return Ok(()),
    };
    let also = if groups.iter().any(|rule| rule.sum_count() > 0) { "" } else { "use `capturable()`, or " };
    let why = format!(
        "{why}, and every launch of a captured step repeats the numbers of the capture: {also}update outside of the capture"
    );
    Err(Error::usage(C::NAME, why))
}

/// Tells whether an update depends on the number of updates before it, as Adam's bias correction does.
fn depends_on_step<C: UpdateRule>(config: &C) -> bool {
    let at = |step| config.launch_scalars(StepContext { lr: 1.0, step });
    at(1).is_none() || at(1) != at(2)
}

/// The numbers of a part's updates in device memory, and the captured updates that read them.
pub(crate) struct DeviceNumbers<R: Runtime> {
    memory: Option<Flat<R>>,
    /// The numbers that the memory holds.
    row: SmallVec<[f64; 8]>,
    /// The memory-reading form of the last update's program.
    form: Option<Arc<MemoryForm>>,
    captured: Option<CapturedUpdate>,
    /// The numbers of the captured update's next launch, once prepared.
    next: Option<NextNumbers<R>>,
}

/// Numbers for the next launch, not yet in the memory.
struct NextNumbers<R: Runtime> {
    step: u64,
    numbers: SmallVec<[f64; 8]>,
    /// The numbers on the device, if they differ from those that the memory holds.
    row: Option<Tensor<R>>,
}

/// The update of a captured step.
#[derive(Default)]
struct CapturedUpdate {
    /// The program that reads its numbers from memory; `None` for an update whose numbers stay as they are.
    form: Option<Arc<MemoryForm>>,
    /// The numbers at the time of the capture.
    row: SmallVec<[f64; 8]>,
    /// The parameters that it updates.
    params: Vec<Range<usize>>,
}

/// A program, and its form that reads its launch values from memory.
struct MemoryForm {
    program: Program,
    in_memory: Program,
    inputs: SmallVec<[DType; 8]>,
    outputs: SmallVec<[Option<DType>; 8]>,
    /// The dtype in which updates are computed.
    dtype: DType,
}

impl MemoryForm {
    fn new(program: &Program, inputs: &[DType], outputs: &[Option<DType>]) -> Result<MemoryForm> {
        let typed = program.resolve(inputs, outputs)?;
        let mut floats = program.launch_values().into_iter().map(|id| typed.dtypes[id as usize]);
        let dtype = floats.find(|dtype| dtype.is_float()).unwrap_or(DType::F32);
        let in_memory = program.with_launch_values_in_memory(&typed, dtype)?;
        Ok(MemoryForm { program: program.clone(), in_memory, inputs: inputs.into(), outputs: outputs.into(), dtype })
    }

    fn numbers(&self, scalars: &[Scalar]) -> Result<SmallVec<[f64; 8]>> {
        let typed = self.program.resolve(&self.inputs, &self.outputs)?;
        Ok(self.program.launch_numbers(&typed, scalars).into_iter().map(Number::to_f64).collect())
    }
}

impl<R: Runtime> Default for DeviceNumbers<R> {
    fn default() -> Self {
        DeviceNumbers { memory: None, row: SmallVec::new(), form: None, captured: None, next: None }
    }
}

impl<R: Runtime> DeviceNumbers<R> {
    /// Prepares for the updates of a step: a new capture replaces the previous one.
    pub(crate) fn begin(&mut self, capturing: bool) {
        if capturing {
            (self.captured, self.next) = (None, None);
        }
    }

    /// Returns the program that reads its numbers from memory, and one scalar tensor for each number, which follow the
    /// program's other inputs. The numbers are written to the memory now, except in a capture: then
    /// [`advance`](DeviceNumbers::advance) writes them before each launch.
    pub(crate) fn of_update(
        &mut self,
        rt: &R,
        program: &Program,
        scalars: &[Scalar],
        (inputs, outputs): (SmallVec<[DType; 8]>, SmallVec<[Option<DType>; 8]>),
        params: Range<usize>,
    ) -> Result<(Program, Vec<Tensor<R>>)> {
        let form = match self.form.take_if(|f| f.program == *program && f.inputs == inputs) {
            Some(form) => form,
            None => Arc::new(MemoryForm::new(program, &inputs, &outputs)?),
        };
        self.form = Some(form.clone());
        let numbers = form.numbers(scalars)?;
        if rt.is_capturing() {
            self.note_captured(&form, &numbers, params)?;
        } else {
            self.write(rt, form.dtype, &numbers)?;
        }
        let Some(memory) = &self.memory else { return Ok((form.in_memory.clone(), Vec::new())) };
        let row = memory.tensor(0)?;
        let each = (0..numbers.len()).map(|k| row.narrow(0, k, 1)?.reshape([])).collect::<Result<_>>()?;
        Ok((form.in_memory.clone(), each))
    }

    fn note_captured(&mut self, form: &Arc<MemoryForm>, numbers: &[f64], params: Range<usize>) -> Result<()> {
        let fail = |why: &str| Err(Error::usage(form.program.name(), why));
        if self.row.len() != numbers.len() {
            return fail("take a step or two before the capture: its kernels and its memory must be there");
        }
        let new = || CapturedUpdate { form: Some(form.clone()), row: numbers.into(), params: Vec::new() };
        let captured = self.captured.get_or_insert_with(new);
        if captured.row[..] != *numbers {
            return fail(
                "parameters of one group have had different numbers of updates, and a captured step has one number for all of them",
            );
        }
        captured.params.push(params);
        Ok(())
    }

    /// Notes a captured update of parameters whose numbers stay as they are.
    pub(crate) fn note_constant(&mut self, params: Range<usize>) {
        self.captured.get_or_insert_default().params.push(params);
    }

    fn write(&mut self, rt: &R, dtype: DType, numbers: &[f64]) -> Result<()> {
        if self.row[..] == *numbers {
            return Ok(());
        }
        self.reserve(rt, dtype, numbers.len())?;
        self.put(&uploaded(rt, dtype, numbers)?, numbers)
    }

    /// Allocates memory for `count` numbers.
    fn reserve(&mut self, rt: &R, dtype: DType, count: usize) -> Result<()> {
        if self.row.len() != count {
            let layout = FlatLayout::new(dtype, [("numbers".to_string(), Shape::new(&[count])?)]);
            self.memory = Some(Flat::zeros_for(rt, MemoryCategory::Optimizer, layout)?);
            self.row = smallvec![0.0; count];
        }
        Ok(())
    }

    fn put(&mut self, row: &Tensor<R>, numbers: &[f64]) -> Result<()> {
        if let Some(memory) = &mut self.memory {
            memory.overwrite(0, row)?;
        }
        (self.row, self.next) = (numbers.into(), None);
        Ok(())
    }

    /// Uploads the numbers that `scalars` gives for the next step of the captured updates, and changes nothing yet.
    /// Returns false if there are no such updates.
    pub(crate) fn prepare(
        &mut self,
        rt: &R,
        steps: &[u64],
        scalars: impl FnOnce(u64) -> Option<crate::Scalars>,
    ) -> Result<bool> {
        let Some(CapturedUpdate { form, params, .. }) = &self.captured else { return Ok(false) };
        let Some(form) = form else { return Ok(true) };
        let Some(step) = params.first().map(|params| steps[params.start] + 1) else { return Ok(false) };
        let Some(scalars) = scalars(step) else { return Ok(false) };
        let (numbers, dtype) = (form.numbers(&scalars)?, form.dtype);
        if self.next.as_ref().is_some_and(|next| next.step == step && next.numbers == numbers) {
            return Ok(true);
        }
        self.reserve(rt, dtype, numbers.len())?;
        let row = (self.row != numbers).then(|| uploaded(rt, dtype, &numbers)).transpose()?;
        self.next = Some(NextNumbers { step, numbers, row });
        Ok(true)
    }

    /// Writes the prepared numbers to the memory, and counts the captured updates in `steps`.
    pub(crate) fn advance(&mut self, steps: &mut [u64]) -> Result<()> {
        if let Some(CapturedUpdate { form: None, params, .. }) = &self.captured {
            params.iter().flat_map(|params| params.clone()).for_each(|i| steps[i] += 1);
            return Ok(());
        }
        let Some(NextNumbers { step, numbers, row }) = self.next.take() else { return Ok(()) };
        row.map_or(Ok(()), |row| self.put(&row, &numbers))?;
        let params = self.captured.iter().flat_map(|captured| &captured.params);
        params.for_each(|params| steps[params.clone()].fill(step));
        Ok(())
    }
}

/// Uploads numbers to a tensor of the device.
fn uploaded<R: Runtime>(rt: &R, dtype: DType, numbers: &[f64]) -> Result<Tensor<R>> {
    match dtype {
        DType::F64 => Tensor::from_slice(rt, [numbers.len()], numbers),
        _ => {
            let numbers: SmallVec<[f32; 8]> = numbers.iter().map(|x| *x as f32).collect();
            Tensor::from_slice(rt, [numbers.len()], &numbers)
        }
    }
}
