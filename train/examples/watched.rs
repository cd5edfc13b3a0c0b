//! A small run that is watched in every way there is: all sinks, metrics, a timeline of three steps, a summary, a report. The stages
//! `tensorboard` and `browser` look at what it writes.
//!
//! `cargo run -p weftgrad-train --example watched -- FOLDER`

use autograd::Var;
use comm::{NoOpCommunicator, TracedCommunicator};
use data::{Array, Dataset, Loader, Rows};
use distributed::train::{Loss, TrainStep};
use nn::{Forward, Init, Linear, ModuleExt, Relu, Sequential, loss::cross_entropy};
use numcore::{
    MemoryCategory, Result, Runtime, Tensor,
    ops::PointwiseOps,
    rng::Philox,
    trace::{Recording, RecordingOptions},
};
use optim::AdamWConfig;
use runtime_cpu::Cpu;
use train::{
    metrics::{Accuracy, ConfusionMatrix, Metric},
    recorder::{RunTimeline, UsageSampler},
    report::{HtmlReport, Report, SvgCurves},
    sink::{Histogram, Jsonl, Many, Record, Sink, TensorBoard, Terminal, Value},
};

const STEPS: u64 = 60;
const CLASSES: usize = 4;

/// Points around the corners of a square, and which corner it is.
fn points() -> Result<(Vec<f32>, Vec<i64>)> {
    let mut rng = Philox::new(1, 0);
    let labels: Vec<i64> = (0..512).map(|_| (rng.next_u64() % CLASSES as u64) as i64).collect();
    let corner = |label: i64| [(label % 2) as f32, (label / 2) as f32];
    let near = |x: f32, rng: &mut Philox| x + 0.35 * rng.normal() as f32;
    let points = labels.iter().flat_map(|&label| corner(label).map(|x| near(x, &mut rng))).collect();
    Ok((points, labels))
}

fn main() -> Result<()> {
    let folder = std::env::args().nth(1).unwrap_or_else(|| "target/watched".into());
    let rt = Cpu::new();
    let init = Init::new(&rt, 42);
    let model = Sequential::new().push(Linear::new(&init, 2, 64)?).push(Relu).push(Linear::new(&init, 64, CLASSES)?);
    let (inputs, labels) = points()?;
    let everything = Var::new(Tensor::from_slice(&rt, [512, 2], &inputs)?);
    let targets = Tensor::from_slice(&rt, [512], &labels)?;
    let summary = model.summarize(|| model.forward(&everything))?;

    let rows = Rows::new(Array::new([512, 2], inputs)?)?.zip(Rows::new(Array::from_vec(labels))?)?;
    let mut batches = Loader::new(rows).batch(64).shuffle(7).workers(2).stack().on(&rt).endless(Default::default())?;
    let comm = TracedCommunicator::over(&(std::sync::Arc::new(NoOpCommunicator::new(&rt)) as comm::Comm<Cpu>));
    let mut step = TrainStep::builder(&comm, &model)
        .optimizer(AdamWConfig { lr: 1e-2, ..Default::default() })
        .max_norm(1.0)
        .build()?;

    let options = [("optimizer", "AdamW"), ("lr", "1e-2"), ("batch", "64"), ("note", "<b>shown, not obeyed</b>")];
    let page = Report::new("corners of a square").configuration(options).text("Model", summary.to_string());
    let mut sinks = Many::new()
        .with(Terminal::new().steps(STEPS).show(["train/loss", "validation/accuracy"]))
        .with(Jsonl::in_folder(&folder)?)
        .with(TensorBoard::in_folder(&folder)?)
        .with(SvgCurves::in_folder(&folder))
        .with(HtmlReport::at(format!("{folder}/curves.html"), page.clone()));
    let mut records = Vec::new();
    let mut recording = None;
    let mut timeline = RunTimeline::default();
    for number in 1..=STEPS {
        if number == 20 {
            recording =
                Some((Recording::start(RecordingOptions::default())?, UsageSampler::start(Default::default())?));
        }
        let Some(batch) = batches.next().transpose()? else { break };
        let (x, y) = batch.data;
        let rows = x.dims()[0] as f64;
        let (x, y) = (Var::new(x), Var::new(y));
        let metrics = step.step(|_| {
            let mean = cross_entropy(&model.forward(&x)?, &y)?;
            Loss::sum(mean.mul(rows)?, rows)
        })?;
        let loss = metrics.loss()?;
        if number == 23
            && let Some((recording, usage)) = recording.take()
        {
            drop(usage);
            timeline = RunTimeline::of(&recording.stop(), 0);
        }
        let mut record = Record::new(number, batch.epoch).scalar("train/loss", loss);
        record = record.scalar("memory/activations", rt.memory().of(MemoryCategory::Activations).peak as f64);
        record = record.scalar("sometimes not a number", if number % 10 == 0 { f64::NAN } else { 1.0 });
        if number % 10 == 0 {
            record = validated(record, &model, &everything, &targets)?;
        }
        sinks.write(&record)?;
        records.push(record);
    }
    sinks.flush()?;
    page.records(&records).timeline(timeline.clone()).write(format!("{folder}/report.html"))?;
    let write = |name: &str, text: String| {
        let path = format!("{folder}/{name}");
        std::fs::write(&path, text).map_err(|e| numcore::Error::io(path, e))
    };
    write("trace.json", timeline.to_chrome_json_of(0, 1))?;
    write("trace.svg", timeline.to_svg())?;
    println!("{summary}\n{folder}/report.html");
    Ok(())
}

/// Adds what the model makes of all points.
fn validated(record: Record, model: &Sequential<Cpu>, x: &Var<Cpu>, y: &Tensor<Cpu>) -> Result<Record> {
    let scores = autograd::no_grad(|| model.forward(x))?.value()?;
    let (mut accuracy, mut matrix) = (Accuracy::new(), ConfusionMatrix::new(CLASSES)?);
    accuracy.update_tensors(&scores, y)?;
    matrix.update_tensors(&scores, y)?;
    let loss = cross_entropy(&Var::new(scores), &Var::new(y.clone()))?.item()?;
    let (_, weight) = model.named_parameters().remove(0);
    let right = accuracy.value().unwrap_or(f64::NAN);
    Ok(record
        .scalar("validation/loss", loss)
        .scalar("validation/accuracy", right)
        .with("weights", Value::Histogram(Histogram::of(&weight.value()?.to_vec::<f32>()?)))
        .with("confusion", Value::Image(matrix.to_image()?))
        .with("sample", Value::Text(format!("{:.1} % are <b>right</b>", 100.0 * right))))
}
