// How AMX tiles are set up, and whether the system lets them be used.

#ifndef FORERUN_TILES_H
#define FORERUN_TILES_H
#ifdef __AMX_BF16__

#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// This thread's eight tiles: so many rows of 64 bytes each.
static inline void set_up_tiles(const uint8_t rows[8]) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) tiles.bytes[tile] = 64;
    for (int tile = 0; tile < 8; tile++) tiles.rows[tile] = rows[tile];
    __asm__ volatile("" : : "r"(&tiles) : "memory");    // GCC believes that the next line reads 8 bytes of it
    _tile_loadconfig(&tiles);
}

// Whether the system keeps the state of tiles for this process, which it does from the first time that it is asked.
static inline int may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

#endif
#endif
