//! Two ranks over a slow link: the communication time that a step does not hide, bucket by bucket and unit by unit.

use std::time::Duration;

use weftgrad::{
    distributed::{
        buckets::BucketLimits,
        comm::Link,
        zero::{UnitOf, ZeroStage},
    },
    prelude::*,
};

use crate::training::{BUCKETS, Case, Way, rounds};

const CASES: [Case; 8] = [
    Case::one("1 rank", 1),
    Case::two("ddp", BUCKETS),
    Case::two("ddp, 25 MiB a bucket", Way::Ddp(Some(BucketLimits { first: 1 << 20, others: 25 << 20 }))),
    Case::two("ddp, one bucket", Way::Ddp(Some(BucketLimits { first: usize::MAX, others: usize::MAX }))),
    Case::two("zero 1", Way::Zero(ZeroStage::Optimizer, UnitOf::layers)),
    Case::two("zero 2", Way::Zero(ZeroStage::Gradients, UnitOf::layers)),
    Case::two("zero 3", Way::Zero(ZeroStage::Parameters, UnitOf::layers)),
    Case::two("zero 3, one unit", Way::Zero(ZeroStage::Parameters, UnitOf::whole)),
];

/// Parses `LATENCY_US,GB_PER_S`.
pub(crate) fn parse(text: &str) -> std::result::Result<Link, String> {
    let numbers = text.split_once(',').and_then(|(latency, bandwidth)| {
        Some((latency.parse().ok()?, bandwidth.parse::<f64>().ok().filter(|gb| *gb > 0.0)?))
    });
    let (latency, gigabytes) = numbers.ok_or("give microseconds and GB/s, as in 50,0.125")?;
    Ok(Link { latency: Duration::from_micros(latency), bandwidth: gigabytes * 1e9 })
}

pub(crate) fn run(n: usize, link: Link) -> Result<()> {
    let all = rounds(&CASES, n, Some(link))?;
    println!("{link:?}");
    println!("{:22} {:>10} {:>10} {:>12} {:>12}", "", "ms a step", "per rank", "ms on link", "ms exposed");
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let one = CASES[0].rate(all[0][n / 2].step);
    for (case, measured) in CASES.iter().zip(&all) {
        let m = &measured[n / 2];
        let on_link: Duration = m.parts.values().map(|p| p.on_link).sum();
        let ratio = format!("{:.3}×", case.rate(m.step) / one);
        println!("{:22} {:>10.1} {ratio:>10} {:>12.1} {:>12.1}", case.name, ms(m.step), ms(on_link), ms(m.exposed));
        // Orders bucket 10 after bucket 9.
        let mut parts: Vec<_> = m.parts.iter().filter(|_| case.ranks > 1).collect();
        parts.sort_by_key(|(name, _)| name.len());
        for (name, part) in parts {
            println!("    {name:40} {:>12.1} {:>12.1}", ms(part.on_link), ms(part.exposed));
        }
    }
    Ok(())
}
