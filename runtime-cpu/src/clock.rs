//! The time-stamp counter of x86 CPUs, as a clock of recordings. It is read in half the time of the system's clock.

use numcore::trace::ClockSource;

/// The counter where it grows at one rate on all cores, and otherwise the system's clock.
pub(crate) fn source() -> ClockSource {
    #[cfg(target_arch = "x86_64")]
    {
        use std::sync::OnceLock;
        static STEADY: OnceLock<bool> = OnceLock::new();
        if *STEADY.get_or_init(|| counter::is_invariant() && is_trusted_by_system()) {
            return ClockSource::Counter(counter::read);
        }
    }
    ClockSource::System
}

/// Tells whether the operating system keeps time by this counter, after it compared the counters of the cores. Without
/// a system's answer, it is true: the CPU's own flag decides.
#[cfg(target_arch = "x86_64")]
fn is_trusted_by_system() -> bool {
    let chosen = std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    chosen.map_or(true, |name| ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page"].contains(&name.trim()))
}

#[cfg(target_arch = "x86_64")]
mod counter {
    use std::arch::x86_64::{__cpuid, _rdtsc};

    /// The CPU's flag for a counter that neither follows the frequency of a core nor stops while the core sleeps.
    const INVARIANT: u32 = 1 << 8;

    pub(super) fn is_invariant() -> bool {
        const POWER: u32 = 0x8000_0007;
        __cpuid(0x8000_0000).eax >= POWER && __cpuid(POWER).edx & INVARIANT != 0
    }

    pub(super) fn read() -> u64 {
        // SAFETY: every CPU of this architecture has the instruction. A process that may not use it could not read the
        // system's clock either, which is made of it.
        unsafe { _rdtsc() }
    }
}

#[cfg(test)]
mod tests {
    use numcore::trace::{Recording, RecordingOptions, SpanKind, span};

    #[test]
    fn spans_of_the_counter_lie_in_their_recording_in_order() {
        let recording = Recording::start(RecordingOptions { clock: super::source(), ..Default::default() }).unwrap();
        for _ in 0..100 {
            drop(span(SpanKind::Phase, "read"));
        }
        let trace = recording.stop();
        let read = |name: &str| name == "read";
        let threads = trace.threads.iter().filter(|thread| thread.spans.iter().any(|span| read(&span.name)));
        let spans: Vec<_> = threads.flat_map(|thread| &thread.spans).filter(|span| read(&span.name)).collect();
        assert_eq!(spans.len(), 100);
        assert!(spans.windows(2).all(|pair| pair[0].start <= pair[1].start));
        assert!(spans.iter().all(|span| span.start <= span.end && span.end <= trace.length));
    }
}
