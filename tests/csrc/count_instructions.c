// A plugin of QEMU's user mode that prints how many instructions ran. The declarations are the part of
// QEMU's plugin interface, version 1, that it needs; Debian's package has no header.
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
enum { ADD_U64 = 0 };
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t,
                                           void (*)(qemu_plugin_id_t, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb*, int, void*, uint64_t);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void*), void*);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb*);

int qemu_plugin_version = 1;
static uint64_t num_instructions;

static void on_block(qemu_plugin_id_t id, struct qemu_plugin_tb* block) {
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, ADD_U64, &num_instructions,
                                             qemu_plugin_tb_n_insns(block));
}

static void on_exit(qemu_plugin_id_t id, void* data) {
    (void)id, (void)data;
    fprintf(stderr, "instructions %" PRIu64 "\n", num_instructions);
}

int qemu_plugin_install(qemu_plugin_id_t id, const void* info, int count, char** given) {
    (void)info, (void)count, (void)given;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_block);
    qemu_plugin_register_atexit_cb(id, on_exit, NULL);
    return 0;
}
