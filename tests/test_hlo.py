"""What is read from the text of optimised programs.

`MATMUL` was written by the real TPU compiler (jax 0.10.2, libtpu 0.0.52, v5e:2x4; lines are shortened in their
metadata and backend_config alone): the gradient of `(x @ w).astype(float32).sum()` for a bfloat16 w [1024, 4096],
replicated, and x [4096, 1024], divided over eight chips. The other texts are made by hand in the same form.
"""

import jax
import jax.numpy as jnp

from vitplast_jax import sharding
from vitplast_jax.training import hlo

MATMUL = """HloModule jit__lambda, is_scheduled=true, num_partitions=8

%bitcast_fusion (bitcast_input: bf16[512,1024]) -> bf16[512,1024] {
  %bitcast_input = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %bitcast = bf16[512,1024]{1,0:T(8,128)(2,1)} bitcast(%bitcast_input)
}

%fused_computation.1 () -> bf16[512,4096] {
  %constant.2.clone.4 = bf16[]{:T(256)} constant(1)
  ROOT %broadcast_in_dim.4 = bf16[512,4096]{1,0:T(8,128)(2,1)} broadcast(%constant.2.clone.4), dimensions={}
}

%fused_computation (param_0: bf16[512,1024]) -> bf16[1024,4096] {
  %param_0 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %fusion.3 = bf16[512,1024]{1,0:T(8,128)(2,1)} fusion(%param_0), kind=kLoop, calls=%bitcast_fusion
  %fusion.1 = bf16[512,4096]{1,0:T(8,128)(2,1)} fusion(), kind=kLoop, calls=%fused_computation.1
  ROOT %convolution.1 = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} convolution(%fusion.3, %fusion.1), dim_labels=fb_io->bf
}

%add.clone (x.3: bf16[], y.1: bf16[]) -> bf16[] {
  %y.1 = bf16[]{:T(256)} parameter(1)
  %x.3 = bf16[]{:T(256)} parameter(0)
  ROOT %add.1 = bf16[]{:T(256)} add(%x.3, %y.1)
}

ENTRY %main.0_spmd (param: bf16[512,1024]) -> bf16[1024,4096] {
  %param = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %copy-start = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%param), cross_program_prefetch_index=0
  %copy-done = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done), kind=kOutput, calls=%fused_computation, backend_config={"flag_configs":[],"window_config":{"kernel_window_bounds":["64","8"],"estimated_cycles":"49760","iteration_bounds":["4","1","1"]}}
  ROOT %all-reduce = bf16[1024,4096]{1,0:T(8,128)(2,1)} all-reduce(%fusion), channel_id=1, replica_groups=mesh['axis_0'=8] {'axis_0'}, use_global_device_ids=true, to_apply=%add.clone, backend_config={"collective_algorithm_config":{"debug":"colors:2"}}
}
"""  # noqa: E501

LOOP = """HloModule loop
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %work = f32[8]{0} fusion(%p), kind=kLoop, calls=%inner, backend_config={"window_config":{"estimated_cycles":"10"}}
  %all-reduce.2 = (f32[8]{0:T(128)}, f32[2,2]{1,0}) all-reduce(%work, %work), to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%p, %work)
}
%inner (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%q), backend_config={"window_config":{"estimated_cycles":"1000"}}
}
%condition (p.1: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%p.1, %p.1), direction=LT
}
%scatter (s: f32[16]) -> f32[2] {
  %s = f32[16]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%s), dimensions={0}, to_apply=%add
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %while.1 = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %gather = (bf16[4]{0}, bf16[32]{0}) all-gather-start(%a), dimensions={0}
  %gathered = bf16[32]{0} all-gather-done(%gather)
  %permute = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%a)
  %both = f32[2]{0} fusion(%a), kind=kCustom, calls=%scatter, backend_config={"estimated_cycles":"7"}
  ROOT %last = f32[8]{0} negate(%a)
}
"""  # noqa: E501

# The collectives of a step of two ViT-B blocks that trains LN1, final norm and a head of ten classes, as the same
# compiler writes them for four slices of v5e:16x16; groups, metadata and what lies in between are left out.
SLICES = """HloModule slices, is_scheduled=true, num_partitions=1024
ENTRY %main (a: f32[768,10]) -> f32[768,10] {
  %a = f32[768,10]{1,0} parameter(0)
  %all-reduce.15 = f32[768,10]{1,0:T(8,128)S(1)} all-reduce(%a), channel_id=7, use_global_device_ids=true, to_apply=%add.clone.clone.1
  %recv.1 = (f32[1,4,128]{2,1,0:T(4,128)}, u32[], token[]) recv(%after-all.1), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.9_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:255}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %send.1 = (f32[1,4,128]{2,1,0:T(4,128)}, u32[], token[]) send(%bitcast.3, %after-all.1), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.9_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:255}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %broadcast.1083 = f32[768,10]{0,1:T(8,128)S(1)} broadcast(%constant.349.clone), dimensions={}
  %dynamic-update-slice = f32[768,10]{0,1:T(8,128)S(1)} dynamic-update-slice(%broadcast.1083, %copy.177, %bitcast.76, %constant.507)
  %all-reduce.16 = (f32[5,8,128]{2,1,0:T(8,128)}, f32[768,10]{0,1:T(8,128)S(1)}) all-reduce(%bitcast.246, %dynamic-update-slice), channel_id=1, use_global_device_ids=true, to_apply=%region_25.26.clone
  %send = (f32[5,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%get-tuple-element.10, %after-all), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.12_0",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:255}",_xla_megascale_transfer_type="ALL_REDUCE"}
}
"""  # noqa: E501


def test_the_compilers_text_of_a_gradient():
    assert hlo.collective_bytes(MATMUL) == {"all-reduce": 2 * 1024 * 4096}
    # 512 x 1024 x 4096 multiply-adds on four units of 128 x 128 take 32,768 cycles at best.
    assert hlo.estimated_cycles(MATMUL) == 49760 >= 512 * 1024 * 4096 // (4 * 128**2)


def test_loops_count_by_their_trips_and_fusions_once():
    assert hlo.estimated_cycles(LOOP) == 4 * 10 + 7  # what is inside a fusion is part of the fusion's estimate
    assert hlo.collective_bytes(LOOP) == {
        "all-reduce": 4 * 4 * (8 + 4),
        "all-gather": 2 * 32,  # the start has operand and result, the done is the same collective
        "collective-permute": 2 * 6,
        "reduce-scatter": 4 * 16,  # the array that is reduced, not the part that stays
    }


def test_trips_that_are_not_noted_are_those_of_the_condition():
    noted = ', backend_config={"known_trip_count":{"n":"4"}}'
    condition = "ROOT %less = pred[] compare(%p.1, %p.1), direction=LT"
    assert noted in LOOP and condition in LOOP
    # As the TPU compiler writes it.
    counted = """%constant.584.clone.1 = s32[]{:T(128)} constant(4)
  %wide.param.1 = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %get-tuple-element.1159 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.34 = pred[]{:T(512)} compare(%get-tuple-element.1159, %constant.584.clone.1), direction=LT"""
    text = LOOP.replace(noted, "").replace(condition, counted)
    assert hlo.collective_bytes(text) == hlo.collective_bytes(LOOP)
    assert hlo.estimated_cycles(text) == hlo.estimated_cycles(LOOP)


def test_what_several_slices_sum_is_counted_once():
    trained = 2 * 2 * 768 + 2 * 768 + 769 * 10  # and the loss
    found = hlo.collective_bytes(SLICES)
    # Small leaves travel together, in whole tiles of 8 x 128: here they fill the fifth to a half.
    assert 4 * (trained + 1) <= found["all-reduce"] == 4 * (768 * 10 + 5 * 8 * 128) < 4 * (trained + 1 + 8 * 128)
    assert found["all-gather"] == 4 * 768 * 10  # written as a sum of arrays that are zero but for a device's own share
    assert found["between-slices"] == 4 * (4 * 128 + 5 * 8 * 128)  # what is sent, not what is received


def test_the_text_of_this_machines_compiler_is_read_too():
    mesh = sharding.make_mesh(8, 1)
    rows, everywhere = sharding.batch(mesh), sharding.replicated(mesh)
    x = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=rows)
    text = jax.jit(lambda x: x.sum(0), out_shardings=everywhere).lower(x).compile().as_text()
    assert hlo.collective_bytes(text) == {"all-reduce": 4 * 3}
    assert hlo.estimated_cycles(text) == 0
