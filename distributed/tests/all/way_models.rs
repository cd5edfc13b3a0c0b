//! The models of a [`Way`]: whole, cut over the ranks of a mesh, or in stages.

use distributed::pipeline::{balanced, split};

use crate::{
    mixture::{Loads, Mixture},
    pipeline_common::{WIDTH, shape, squares},
    prelude::*,
};

impl Way {
    pub fn plan(&self) -> TensorPlan {
        let plan = match self.kind {
            Kind::Gpt => Gpt::<Cpu>::tensor_plan(),
            Kind::Mixture(_) => Mixture::plan(),
            Kind::Layers(_) => return TensorPlan::new(),
        };
        let plan = plan.sequence_parallel(self.sequence).exchange_in_pieces(self.pieces);
        // Whole sequences are not exchanged in pieces: these plans have whole sums.
        if self.sequence || self.pieces < 3 { plan } else { plan.whole_sums() }
    }

    pub fn freeze(&self, model: &impl Module<Cpu>) {
        self.frozen.iter().for_each(|prefix| model.freeze_where(nn::under(prefix)));
    }

    fn cut<M: Module<Cpu>>(&self, mesh: &Mesh<Cpu>, model: M) -> Result<M> {
        self.freeze(&model);
        mesh.parallelize(&model, &self.plan())?;
        if mesh.plan().size(Axis::Context) > 1 {
            mesh.context_parallel(&model, self.exchange)?;
        }
        Ok(model)
    }

    pub fn init(&self, mesh: &Mesh<Cpu>) -> Init<Cpu> {
        Init::new(mesh.world().runtime(), 7).dtype(self.dtype).lazily()
    }

    /// The whole GPT, cut over the ranks of a mesh.
    pub fn gpt_on(&self, mesh: &Mesh<Cpu>) -> Result<Gpt<Cpu>> {
        self.cut(mesh, Gpt::new(&self.init(mesh), self.gpt)?)
    }

    /// The whole mixture, shared out among the ranks of a mesh.
    pub fn mixture_on(&self, mesh: &Mesh<Cpu>) -> Result<Mixture> {
        self.cut(mesh, self.whole_mixture(&self.init(mesh))?)
    }

    pub fn whole_mixture(&self, init: &Init<Cpu>) -> Result<Mixture> {
        let Kind::Mixture(config) = &self.kind else { panic!("{:?} is no mixture", self.kind) };
        Mixture::new(init, config, self.router)
    }

    pub fn layers_of(&self, init: &Init<Cpu>, layers: usize) -> Result<Sequential<Cpu>> {
        let push = |model: Sequential<Cpu>, _| Ok(model.push(Linear::new(init, WIDTH, WIDTH)?).push(Tanh));
        (0..layers).try_fold(Sequential::new(), push)
    }

    pub fn checked(&self, ranks: usize) -> Option<Checked> {
        let Stages { kind, v, micros, gathered } = self.stages?;
        let schedule = kind.generate(shape(ranks, v, micros)).ok()?;
        Some(
            schedule
                .lower(Lowering { sharded: gathered, ..Default::default() })
                .ok()?
                .check(Limits::default())
                .unwrap(),
        )
    }

    /// All stages of layers.
    pub fn stages_of(&self, mesh: &Mesh<Cpu>, checked: &Checked) -> Result<Vec<Box<dyn Stage<Cpu>>>> {
        let Kind::Layers(layers) = self.kind else { panic!("{:?} has no layers", self.kind) };
        let layers = self.layers_of(&self.init(mesh), layers)?.into_layers();
        let cuts = balanced(&layers, checked.schedule().stages())?;
        split(layers, &cuts)
    }

    /// This rank's stages, and the blocks with experts in them.
    pub fn stages_on(&self, mesh: &Mesh<Cpu>) -> Result<(PipelineModel<Cpu>, Vec<Loads>)> {
        let (pipe, init) = (mesh.axis(Axis::Pipe), self.init(mesh));
        let checked = self.checked(pipe.size()).expect("a schedule of these sizes");
        let (count, placement) = (checked.schedule().stages(), checked.schedule().placement().clone());
        let here = |stage: usize| placement.rank_of(stage) == Some(pipe.rank());
        let (model, loads) = match self.kind {
            Kind::Gpt => {
                let (stages, loss) = Gpt::new(&init, self.gpt)?.split_with_loss(count, self.loss)?;
                stages.iter().for_each(|stage| self.freeze(stage));
                let loss = move |y: &[Var<Cpu>], t: &[Var<Cpu>]| {
                    Loss::sum(loss.of(&y[0], &t[0])?, t[0].dims().iter().product::<usize>() as f64)
                };
                (PipelineModel::on(pipe.rank(), checked, stages).loss(loss), Vec::new())
            }
            Kind::Mixture(_) => {
                let stages = self.whole_mixture(&init)?.split(count);
                stages.iter().for_each(|stage| self.freeze(stage));
                let own = stages.iter().enumerate().filter(|(stage, _)| here(*stage));
                let (loads, loss) = (own.map(|(_, stage)| stage.loads.clone()).collect(), stages[count - 1].loss());
                (PipelineModel::on(pipe.rank(), checked, stages).loss(loss), loads)
            }
            Kind::Layers(_) => {
                let stages = self.stages_of(mesh, &checked)?;
                (PipelineModel::on(pipe.rank(), checked, stages).loss(squares), Vec::new())
            }
        };
        let ties = if self.tied.is_empty() { Vec::new() } else { vec![Tie::new(self.tied.iter().copied())] };
        let model = if let Kind::Gpt = self.kind { model } else { model.ties(ties) };
        if let Kind::Layers(_) = self.kind {
            return Ok((model, loads));
        }
        Ok((model.parallelize(mesh, &self.plan())?.context_parallel(mesh, self.exchange)?, loads))
    }
}
