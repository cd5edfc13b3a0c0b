//! A step that is being captured, or was: the queues that take part in it, and what each launch needs.

use std::sync::Arc;

use numcore::LaunchParticipant;
use parking_lot::Mutex;

use crate::{captured_keys::CapturedKeys, memory::HeldBlocks};

/// The state that the queues `Q` of a captured step share.
pub(crate) struct Capture<Q> {
    pub keys: CapturedKeys,
    /// The memory that the step keeps.
    pub held: Arc<HeldBlocks>,
    /// Queues beside the first that have joined, in order; `None` once the capture has ended.
    joined: Mutex<Option<Vec<Arc<Q>>>>,
    /// Other libraries that will take part in launches, each with its key.
    participants: Mutex<Vec<(usize, Arc<dyn LaunchParticipant>)>>,
}

impl<Q> Capture<Q> {
    /// An open capture, without other queues.
    pub(crate) fn new(keys: CapturedKeys) -> Arc<Capture<Q>> {
        let joined = Mutex::new(Some(Vec::new()));
        Arc::new(Capture { keys, held: Arc::default(), joined, participants: Mutex::default() })
    }

    /// Tells whether the step is being captured.
    pub(crate) fn is_open(&self) -> bool {
        self.joined.lock().is_some()
    }

    /// Adds a queue that takes part from now on.
    pub(crate) fn add(&self, queue: &Arc<Q>) {
        self.joined.lock().iter_mut().for_each(|joined| joined.push(queue.clone()));
    }

    /// The queues that have joined.
    pub(crate) fn joined(&self) -> Vec<Arc<Q>> {
        self.joined.lock().clone().unwrap_or_default()
    }

    /// Ends the capture; returns the queues that had joined.
    pub(crate) fn close(&self) -> Vec<Arc<Q>> {
        self.joined.lock().take().unwrap_or_default()
    }

    /// Adds a participant of launches, unless there is one of this key.
    pub(crate) fn take_part(&self, key: usize, participant: &mut dyn FnMut() -> Arc<dyn LaunchParticipant>) {
        let mut participants = self.participants.lock();
        if !participants.iter().any(|(own, _)| *own == key) {
            participants.push((key, participant()));
        }
    }

    /// Takes out the participants of launches, in the order in which they were added.
    pub(crate) fn take_participants(&self) -> Vec<Arc<dyn LaunchParticipant>> {
        std::mem::take(&mut *self.participants.lock()).into_iter().map(|(_, participant)| participant).collect()
    }
}
